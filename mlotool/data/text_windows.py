"""Windows of a text as samples of a language model: each token is predicted from those before it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

# n: windows, b: batch, t: length of a window

Batch = dict[str, Tensor]


class TextWindows(Dataset[Batch]):
    """One split: places in a text, at each of which a window of `length + 1` tokens begins.

    Batches are `{"input": (b, t), "target": (b, t), "domain": (b,), "index": (b,)}`, all int64. The input is a window
    without its last token, the target the same without its first one, so `target[:, i]` follows `input[:, i]`; `index`
    is the window's position in this split. The text stays in its own dtype: bytes take an eighth of int64.

    Args:
        tokens: (number of tokens,), a whole text, of whole numbers.
        starts: (n,) int64, where the windows begin in it.
        domain: (n,) int64, the number of each window's domain.
        length: t.

    Example:
        >>> dataset = TextWindows(torch.tensor(list(b"abcdef")), torch.tensor([0, 3]), torch.tensor([0, 0]), length=2)
        >>> bytes(dataset[1]["input"].tolist()), bytes(dataset[1]["target"].tolist())
        (b'de', b'ef')
    """

    def __init__(self, tokens: Tensor, starts: Tensor, domain: Tensor, length: int) -> None:
        assert len(starts) == len(domain), (starts.shape, domain.shape)
        assert not len(starts) or int(starts.max()) + length < len(tokens), (int(starts.max()), length, len(tokens))
        self.tokens, self.starts, self.domain, self.length = tokens, starts, domain, length
        self._places = torch.arange(length + 1)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Batch:
        """Return one sample, without the batch's axis."""
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Batch:
        """Return a collated batch of the windows at `indices` (b,)."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        window = self.tokens[self.starts[index][:, None] + self._places].to(torch.int64)
        return {"input": window[:, :-1], "target": window[:, 1:], "domain": self.domain[index], "index": index}
