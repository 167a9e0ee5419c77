"""How stages hand tensors to each other: within a process, or from process to process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.distributed.collectives import Ranks, stages_and_parts
from mlotool.distributed.point_to_point import Messages

T = TypeVar("T")

KINDS = ("serial", "variable", "multiplier", "state", "slope", "length", "names", "output", "shared")
"""Of messages; two stages never have two of one kind under way."""


class AbstractTransport(ABC):
    """How stages hand tensors to each other. A message is known by its kind, its sending and its receiving stage.

    Args:
        replicas: the processes that have the same stages, each for another part of the batch; None is this one alone.

    Attributes:
        is_divided: whether other stages belong to other processes.

    Example:
        >>> transport: AbstractTransport = LocalTransport()
        >>> transport.is_divided, list(transport.own(num_stages=3))
        (False, [0, 1, 2])
    """

    is_divided: ClassVar[bool]

    def __init__(self, replicas: Ranks | None = None) -> None:
        self.replicas = replicas or Ranks()

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
        """Wait for the tensor that `expect` was called for, and return it."""

    def agreed(self, compute: Callable[[], T]) -> T:
        """Call a function in one process, and return its result in all of them."""
        return self.replicas.of_first(compute)

    def gathered(self, own: dict[str, T]) -> dict[str, T]:
        """Return the entries that all stages' processes have, as one mapping; every process has keys of its own."""
        return own

    def finish(self) -> None:
        """Wait until everything that was sent has left."""


class LocalTransport(AbstractTransport):
    """All stages are in this process: a message is the tensor itself.

    Args:
        replicas: the other processes, each of which has all stages for another part of the batch; None: there are none.

    Attributes:
        has_lanes: whether stages have CUDA streams of their own.

    Example:
        >>> transport = LocalTransport()
        >>> transport.send("state", 0, 1, torch.ones(2))
        >>> transport.receive("state", 0, 1)
        tensor([1., 1.])
    """

    is_divided = False

    def __init__(self, replicas: Ranks | None = None) -> None:
        super().__init__(replicas)
        self.has_lanes = False
        self._letters: dict[tuple[str, int, int], tuple[Tensor, torch.cuda.Event | None]] = {}

    def own(self, num_stages: int) -> Sequence[int]:
        """Return the numbers of all stages."""
        return range(num_stages)

    def send(self, kind: str, source: int, target: int, tensor: Tensor) -> None:
        """Keep the tensor for its receiver."""
        event = None
        if self.has_lanes:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tensor.device))
        self._letters[kind, source, target] = tensor, event

    def expect(self, kind: str, source: int, target: int, blank: Tensor) -> None:
        """Do nothing: the sender keeps the tensor."""

    def receive(self, kind: str, source: int, target: int) -> Tensor:
        """Return the tensor that was sent, once the sender's CUDA stream has computed it."""
        tensor, event = self._letters.pop((kind, source, target))
        if event is not None:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(event)
            # Its memory belongs to the sender's stream, which must not use it again before this one is done with it.
            tensor.record_stream(stream)
        return tensor

    def finish(self) -> None:
        """Forget messages that a step which has failed has left behind."""
        self._letters.clear()


class ProcessTransport(AbstractTransport):
    """Each stage is in a process of its own: messages go from process to process while the computation goes on.

    Args:
        stages: the processes of this part of the batch, one for each stage.
        replicas: the processes of this stage, one for each part of the batch.

    Raises:
        RunError: in each method that waits, where another process is gone.

    Example:
        >>> transport = ProcessTransport.join(rank=1, num_ranks=2, num_stages=2, key="parallel")
        >>> transport.is_divided, transport.own(num_stages=2), transport.replicas.size
        (True, (1,), 1)
    """

    is_divided = True

    def __init__(self, stages: Ranks, replicas: Ranks) -> None:
        super().__init__(replicas)
        self.stages = stages
        self._messages = Messages(stages, KINDS)

    @classmethod
    def join(cls, rank: int, num_ranks: int, num_stages: int, key: str) -> "ProcessTransport":
        """Return the transport of `rank = part * num_stages + stage`; every process must call it.

        Args:
            rank: of this process.
            num_ranks: how many there are.
            num_stages: K.
            key: of the setting, for messages.

        Raises:
            ConfigError: the ranks cannot be divided among the stages.
        """
        num_parts, rest = divmod(num_ranks, num_stages)
        if rest or not num_parts:
            raise ConfigError(
                f"{key}.stages: found {num_stages} stages in processes of their own, and {num_ranks} ranks; expected "
                f"a multiple of {num_stages} ranks. Set runner.devices={max(num_parts, 1) * num_stages}, or "
                f"{key}.processes=false for all stages in each rank."
            )
        return cls(*stages_and_parts(rank, num_ranks, num_stages))

    def own(self, num_stages: int) -> Sequence[int]:
        """Return the number of this process's stage."""
        return (self.stages.rank,)

    def send(self, kind: str, source: int, target: int, tensor: Tensor) -> None:
        """Send without waiting."""
        self._messages.send(kind, target, tensor)

    def expect(self, kind: str, source: int, target: int, blank: Tensor) -> None:
        """Begin to receive."""
        self._messages.expect(kind, source, blank)

    def receive(self, kind: str, source: int, target: int) -> Tensor:
        """Wait for the tensor, and return it."""
        return self._messages.receive(kind, source)

    def agreed(self, compute: Callable[[], T]) -> T:
        """Call a function in one process, and return its result in all of them."""
        return self.stages.of_first(lambda: self.replicas.of_first(compute))

    def gathered(self, own: dict[str, T]) -> dict[str, T]:
        """Return the entries of all processes of this part of the batch; every one of them must call it."""
        return {key: value for each in self.stages.gather(own) for key, value in each.items()}

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        self._messages.finish()
