"""The states and adjoints of earlier solves, by sample."""

from typing import Any

from torch import Tensor

# s: samples of the data set, b: of the batch, N: layers


class WarmStart:
    """Keeps the last states and adjoints of each sample, whatever batches it comes in.

    Args:
        index: (b,) of the batch at hand, the samples' positions in their data set; None: the only batch there is.

    Attributes:
        index: set before each solve.
    """

    def __init__(self, index: Tensor | None = None) -> None:
        self.index = index
        self._values: dict[str, Tensor] = {}

    def recall(self, index: Tensor | None, kind: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the values (N + 1, b, ...) of that kind, if there are any for all samples of the batch."""
        found = self._values.get(kind)
        if found is None:
            return None
        if index is None:
            return found if found.shape == shape else None
        if (shape[0], *shape[2:]) != (found.shape[1], *found.shape[2:]) or shape[1] != len(index):
            return None
        rows = index.to(found.device)
        known = self._values[f"{kind} known"]
        is_known = int(rows.max()) < len(found) and bool(known[rows].all())
        return found[rows].transpose(0, 1) if is_known else None

    def remember(self, index: Tensor | None, kind: str, values: Tensor) -> None:
        """Keep the values (N + 1, b, ...) of a batch."""
        values = values.detach()
        if index is None or len(index) != values.shape[1]:
            self._values[kind] = values
            return
        rows, by_sample = index.to(values.device), values.transpose(0, 1)
        size = int(rows.max()) + 1
        self._values[kind] = _grown(self._values.get(kind), size, by_sample)
        self._values[f"{kind} known"] = _grown(
            self._values.get(f"{kind} known"), size, rows.new_zeros(len(rows)).bool()
        )
        self._values[kind][rows] = by_sample
        self._values[f"{kind} known"][rows] = True

    def state_dict(self) -> dict[str, Any]:
        """Return all values, in plain containers."""
        return dict(self._values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self._values = {kind: tensor.clone() for kind, tensor in state.items()}


def _grown(table: Tensor | None, size: int, like: Tensor) -> Tensor:
    """Return a table with at least so many rows in the shape of those of `like`; new ones are zero."""
    fits = table is not None and table.shape[1:] == like.shape[1:]
    if table is not None and fits and len(table) >= size:
        return table
    grown = like.new_zeros(size, *like.shape[1:])
    if table is not None and fits:
        grown[: len(table)] = table
    return grown
