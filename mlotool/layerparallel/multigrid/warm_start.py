"""The states and adjoints of earlier solves, by sample."""

from typing import Any

import torch
from torch import Tensor

# s: samples of the data set, b: of the batch, N: layers


class WarmStart:
    """Keeps the last states and adjoints of each sample, whatever batches it comes in.

    Args:
        index: (b,), the positions of the samples of the batch at hand in their data set; None: the only batch there is.

    Attributes:
        index: set before each solve.

    Example:
        >>> warm_start = WarmStart()
        >>> warm_start.remember(torch.tensor([4, 2]), "states", torch.ones(3, 2, 1))
        >>> warm_start.recall(torch.tensor([2]), "states", (3, 1, 1)).flatten()
        tensor([1., 1., 1.])
        >>> warm_start.recall(torch.tensor([3]), "states", (3, 1, 1)) is None
        True
    """

    def __init__(self, index: Tensor | None = None) -> None:
        self.index = index
        self._values: dict[str, Tensor] = {}

    def recall(self, index: Tensor | None, kind: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the values (N + 1, b, ...) of earlier solves; None unless all samples of the batch have some.

        Args:
            index: (b,), positions of the samples in their data set; None: the only batch there is.
            kind: "states" or "adjoints".
            shape: (N + 1, b, ...), that the values must have.
        """
        if index is None:
            whole = self._values.get(f"{kind} of all")
            return whole if whole is not None and whole.shape == shape else None
        found, known = self._values.get(kind), self._values.get(f"{kind} known")
        if found is None or known is None or found.shape[1:] != (shape[0], *shape[2:]) or shape[1] != len(index):
            return None
        rows = index.to(found.device)
        is_known = int(rows.max()) < len(found) and bool(known[rows].all())
        return found[rows].transpose(0, 1) if is_known else None

    def remember(self, index: Tensor | None, kind: str, values: Tensor) -> None:
        """Keep the values (N + 1, b, ...) of a batch."""
        values = values.detach()
        if index is None or len(index) != values.shape[1]:
            self._values[f"{kind} of all"] = values
            return
        rows, by_sample = index.to(values.device), values.transpose(0, 1)
        size = int(rows.max()) + 1
        is_known = torch.ones(len(rows), dtype=torch.bool, device=values.device)
        for name, own in ((kind, by_sample), (f"{kind} known", is_known)):
            self._values[name] = _grown(self._values.get(name), size, own)
            self._values[name][rows] = own

    def state_dict(self) -> dict[str, Any]:
        """Return all values, in plain containers."""
        return dict(self._values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        self._values = {kind: tensor.clone() for kind, tensor in state.items()}


def _grown(table: Tensor | None, size: int, like: Tensor) -> Tensor:
    """Return a table with at least so many rows in the shape of those of `like`; new ones are zero."""
    fits = table is not None and table.shape[1:] == like.shape[1:] and table.dtype == like.dtype
    table = None if table is None else table.to(like.device)
    if table is not None and fits and len(table) >= size:
        return table
    grown = like.new_zeros(size, *like.shape[1:])
    if table is not None and fits:
        grown[: len(table)] = table
    return grown
