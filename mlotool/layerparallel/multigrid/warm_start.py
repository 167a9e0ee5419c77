"""The values of earlier solves, by batch."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor


class WarmStart:
    """Keeps the states and adjoints of the last solve on each of the last batches.

    Args:
        num_batches: so many are kept, those that were used last.

    Attributes:
        key: the name of the batch at hand.
    """

    def __init__(self, num_batches: int = 64) -> None:
        self.num_batches = num_batches
        self.key: Hashable = None
        self._values: dict[tuple[Hashable, str], Tensor] = {}

    def recall(self, key: Hashable, kind: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the values of that kind for a batch, if there are any of the shape."""
        found = self._values.get((key, kind))
        return found if found is not None and found.shape == shape else None

    def remember(self, key: Hashable, kind: str, values: Tensor) -> None:
        """Keep values; the batches that were used longest ago are dropped."""
        self._values.pop((key, kind), None)
        self._values[key, kind] = values.detach()
        batches = list(dict.fromkeys(other for other, _ in self._values))
        for other in batches[: -self.num_batches]:
            self._values = {name: tensor for name, tensor in self._values.items() if name[0] != other}

    def state_dict(self) -> dict[str, Any]:
        """Return all values, in plain containers."""
        return {"values": [[key, kind, tensor] for (key, kind), tensor in self._values.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self._values = {(_hashable(key), kind): tensor for key, kind, tensor in state["values"]}


def _hashable(key: Any) -> Hashable:
    # What a checkpoint made of a tuple.
    return tuple(key) if isinstance(key, list) else key
