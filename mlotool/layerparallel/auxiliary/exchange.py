"""How neighbouring stages hand tensors to each other."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class AbstractExchange(ABC):
    """Messages between stages, each known by its kind and the two stages.

    Attributes:
        num_replicas: how many workers each stage has, on parts of the batch.
    """

    num_replicas: int = 1

    def own(self, num_stages: int) -> Sequence[int]:
        """Return the stages that this process runs."""
        return range(num_stages)

    @abstractmethod
    def send(self, kind: str, source: int, target: int, tensor: Tensor) -> None:
        """Hand a tensor on, and do not wait for it to arrive; it must stay as it is.

        Args:
            kind: of the message.
            source: the sending stage.
            target: the receiving stage.
            tensor: contiguous.
        """

    def expect(self, kind: str, source: int, target: int, like: Tensor) -> None:
        """Be ready for a tensor of the shape, dtype and device of another one.

        Messages between two stages are expected and sent in one order by both.
        """

    @abstractmethod
    def receive(self, kind: str, source: int, target: int) -> Tensor:
        """Return what was expected, once it is there."""

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean over the workers of one stage."""
        return list(tensors)

    def joined(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of which each worker of one stage has the rows of its part of the batch, all rows."""
        return list(tensors)

    def finish(self) -> None:
        """Wait until everything that was sent has left."""


class LocalExchange(AbstractExchange):
    """All stages in this process: a message is the tensor itself."""

    def __init__(self) -> None:
        self._letters: dict[tuple[str, int, int], Tensor] = {}

    def send(self, kind: str, source: int, target: int, tensor: Tensor) -> None:
        """Keep the tensor for its receiver."""
        self._letters[kind, source, target] = tensor

    def receive(self, kind: str, source: int, target: int) -> Tensor:
        """Return the tensor."""
        return self._letters.pop((kind, source, target))

    def finish(self) -> None:
        """Check that nothing was left lying."""
        assert not self._letters, f"nobody has read {sorted(self._letters)}"
