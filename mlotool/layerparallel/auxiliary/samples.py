"""Which samples a batch has, where their variables are stored, and which of them have none yet."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError

# s: samples of a batch


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Samples:
    """Numbers the samples of a data set and the augmented copies of each, and remembers which have been seen.

    Args:
        num_copies: augmented copies of each sample; copy c of sample n has the number `n num_copies + c`.

    Example:
        >>> samples = Samples(num_copies=2)
        >>> slots = samples.slots({"index": torch.tensor([3, 0]), "copy": torch.tensor([1, 0])}, "parallel")
        >>> slots, samples.meet(slots, slots), samples.meet(slots, slots)
        (tensor([7, 0]), tensor([True, True]), tensor([False, False]))
    """

    def __init__(self, num_copies: int) -> None:
        self._num_copies = num_copies
        self._seen = torch.zeros(0, dtype=torch.bool)

    def slots(self, batch: Any, key: str) -> Tensor:
        """Return the numbers of a batch's samples, (s,), on the CPU.

        Args:
            batch: has an `index`, and a `copy` where there are several.
            key: of the setting, for messages.

        Raises:
            ConfigError: it has not.
        """
        needed = ["index"] if self._num_copies == 1 else ["index", "copy"]
        missing = [name for name in needed if not isinstance(batch, Mapping) or name not in batch]
        if missing:
            raise ConfigError(
                f"{key}.variables: found stored, but the batch has no '{missing[0]}'; expected a mapping with "
                f"{' and '.join(needed)}, which say what sample each variable is of. Use a data set that gives them, "
                f"or set {key}.variables=auxnet."
            )
        for name in needed:
            value = batch[name]
            is_right = isinstance(value, Tensor) and value.ndim == 1 and value.dtype in _WHOLE and int(value.min()) >= 0
            expected = "a whole number of at least 0 a sample, that of its place in the data set"
            require(is_right, f"the batch's '{name}'", value, expected, "Return it from __getitem__: 'index': index.")
        slots: Tensor = batch["index"].cpu()
        if "copy" not in batch:
            return slots
        copy = batch["copy"].cpu()
        if int(copy.max()) >= self._num_copies:
            raise ConfigError(
                f"{key}.copies: found {self._num_copies}, but the batch has copy number {int(copy.max())} of a sample; "
                f"expected as many as the data has. Set {key}.copies to data.augment."
            )
        return slots * self._num_copies + copy

    def meet(self, own: Tensor, everybody: Tensor) -> Tensor:
        """Return which samples are seen for the first time, (s,), and remember all.

        Args:
            own: numbers of this part of the batch, (s,).
            everybody: numbers of all parts.
        """
        missing = int(everybody.max()) + 1 - len(self._seen)
        if missing > 0:
            self._seen = torch.cat([self._seen, torch.zeros(missing, dtype=torch.bool)])
        unseen = ~self._seen[own]
        self._seen[everybody] = True
        return unseen

    def forget(self) -> None:
        """Forget which samples have been seen."""
        self._seen = torch.zeros(0, dtype=torch.bool)

    def state_dict(self) -> dict[str, Any]:
        """Return which samples have been seen."""
        return {"seen": self._seen.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        self._seen = state["seen"].cpu().clone()
