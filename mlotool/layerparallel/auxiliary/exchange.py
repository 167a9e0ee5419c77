"""How stages hand tensors to each other: within a process, or from process to process."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mlotool.core.errors import RunError
from mlotool.layerparallel.auxiliary.replicas import Replicas

T = TypeVar("T")

KINDS = ("serial", "variable", "multiplier", "state", "slope", "length", "names", "output")
"""Of messages; two stages never have two of one kind under way."""


class AbstractExchange(ABC):
    """Messages between stages, each known by its kind and the two stages.

    Args:
        replicas: the other workers of the same stages, on other parts of the batch.

    Attributes:
        is_divided: whether other stages are other processes'.
    """

    is_divided: ClassVar[bool]

    def __init__(self, replicas: Replicas | None = None) -> None:
        self.replicas = replicas or Replicas()

    @abstractmethod
    def own(self, num_stages: int) -> Sequence[int]:
        """Return the stages that this process runs."""

    @abstractmethod
    def send(self, kind: str, source: int, target: int, tensor: Tensor) -> None:
        """Hand a tensor on, and do not wait for it to arrive; it must stay as it is.

        Args:
            kind: of the message.
            source: the sending stage.
            target: the receiving stage.
            tensor: contiguous.
        """

    @abstractmethod
    def expect(self, kind: str, source: int, target: int, blank: Tensor) -> None:
        """Be ready for a tensor.

        Two processes expect and send what they have for each other in one order.

        Args:
            kind: of the message.
            source: the sending stage.
            target: the receiving stage.
            blank: takes the tensor, once it has been received.
        """

    @abstractmethod
    def receive(self, kind: str, source: int, target: int) -> Tensor:
        """Return what was expected, once it is there."""

    def gathered(self, own: dict[str, T]) -> dict[str, T]:
        """Return what all stages have, each under keys of its own."""
        return own

    def finish(self) -> None:
        """Wait until everything that was sent has left."""


class LocalExchange(AbstractExchange):
    """All stages in this process: a message is the tensor itself.

    Attributes:
        has_lanes: whether stages have CUDA streams of their own.
    """

    is_divided = False

    def __init__(self, replicas: Replicas | None = None) -> None:
        super().__init__(replicas)
        self.has_lanes = False
        self._letters: dict[tuple[str, int, int], tuple[Tensor, torch.cuda.Event | None]] = {}

    def own(self, num_stages: int) -> Sequence[int]:
        """All of them."""
        return range(num_stages)

    def send(self, kind: str, source: int, target: int, tensor: Tensor) -> None:
        """Keep the tensor for its receiver."""
        event = None
        if self.has_lanes:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tensor.device))
        self._letters[kind, source, target] = tensor, event

    def expect(self, kind: str, source: int, target: int, blank: Tensor) -> None:
        """Do nothing."""

    def receive(self, kind: str, source: int, target: int) -> Tensor:
        """Return the tensor."""
        tensor, event = self._letters.pop((kind, source, target))
        if event is not None:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(event)
            # Its memory belongs to the sender's stream, which must not use it again before this one is done with it.
            tensor.record_stream(stream)
        return tensor

    def finish(self) -> None:
        """Forget what a step that has failed has left."""
        self._letters.clear()


@dataclass(frozen=True)
class Place:
    """Where a process stands: rank = replica * num_stages + stage.

    Args:
        stage: that it runs.
        replica: the part of the batch that it has.
        num_stages: K.
        group: the processes of the same part of the batch, one a stage; None is all that there are.
    """

    stage: int
    replica: int
    num_stages: int
    group: Any = None

    def rank(self, stage: int) -> int:
        """Return the rank of another stage of the same part of the batch."""
        return self.replica * self.num_stages + stage


class ProcessExchange(AbstractExchange):
    """A stage a process: messages are sent from process to process, under the computation.

    Args:
        place: of this process.
        replicas: the processes of the same stage.
    """

    is_divided = True

    def __init__(self, place: Place, replicas: Replicas) -> None:
        super().__init__(replicas)
        self.place = place
        # A message that is under way needs its tensor.
        self._leaving: list[tuple[Any, Tensor, int]] = []
        self._coming: dict[tuple[str, int], tuple[Any, Tensor]] = {}

    def own(self, num_stages: int) -> Sequence[int]:
        """Its own."""
        return (self.place.stage,)

    def send(self, kind: str, source: int, target: int, tensor: Tensor) -> None:
        """Send without waiting."""
        assert tensor.is_contiguous()
        with _lost(source, target):
            work = dist.isend(tensor, self.place.rank(target), tag=KINDS.index(kind))
        self._leaving.append((work, tensor, target))

    def expect(self, kind: str, source: int, target: int, blank: Tensor) -> None:
        """Begin to receive."""
        with _lost(target, source):
            work = dist.irecv(blank, self.place.rank(source), tag=KINDS.index(kind))
        self._coming[kind, source] = work, blank

    def receive(self, kind: str, source: int, target: int) -> Tensor:
        """Wait for it."""
        work, tensor = self._coming.pop((kind, source))
        with _lost(target, source):
            work.wait()
        return tensor

    def gathered(self, own: dict[str, T]) -> dict[str, T]:
        """Ask all processes of this part of the batch."""
        found: list[Any] = [None] * self.place.num_stages
        dist.all_gather_object(found, own, group=self.place.group)
        return {key: value for each in found for key, value in each.items()}

    def broadcast(self, tensors: Sequence[Sequence[Tensor]]) -> None:
        """Give all processes of this part of the batch what each stage's own process has.

        Args:
            tensors: by stage; filled in place where they are another process's.
        """
        waiting = []
        for stage, values in enumerate(tensors):
            for dtype in dict.fromkeys(each.dtype for each in values):
                alike = [each for each in values if each.dtype == dtype]
                flat = torch.cat([each.detach().reshape(-1) for each in alike])
                work: Any = dist.broadcast(flat, self.place.rank(stage), group=self.place.group, async_op=True)
                waiting.append((stage, alike, flat, work))
        for stage, alike, flat, work in waiting:
            with _lost(self.place.stage, stage):
                work.wait()
            if stage != self.place.stage:
                for each, part in zip(alike, flat.split([each.numel() for each in alike]), strict=True):
                    each.detach().copy_(part.view(each.shape))

    def finish(self) -> None:
        """Wait for what has not left yet."""
        for work, _, target in self._leaving:
            with _lost(self.place.stage, target):
                work.wait()
        self._leaving.clear()


class _lost:  # noqa: N801 - a context
    """Turns what torch says of a process that is gone into what a user can do."""

    def __init__(self, own: int, other: int) -> None:
        self._own, self._other = own, other

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise RunError(
                f"Stage {self._own} has lost the process of stage {self._other} ({str(error).split('. ')[0]}); "
                "expected it to stay until the run ends. Look at what that process has said, and go on with "
                "resume=auto."
            ) from error
