"""What processes tell each other that share a module: stages hand on tensors, parts of the layers their points."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.distributed.collectives import Messages, Ranks, all_ranks, hand_on, stages_and_parts

T = TypeVar("T")

# Of messages; two stages never have two of one kind under way.
KINDS = ("serial", "variable", "multiplier", "state", "slope", "output")


class Transport:
    """How stages hand tensors to each other: within a process, or from process to process while it computes.

    A message is known by its kind, its sending and its receiving stage. Two processes expect and send what they have
    for each other in one order.

    Args:
        stages: the processes of this part of the batch, one for each stage; None: this one has all stages.
        replicas: the processes that have the same stages, each for another part of the batch; None: this one alone.

    Attributes:
        has_lanes: whether the stages of this process have CUDA streams of their own.

    Raises:
        RunError: in each method that waits, where another process is gone.

    Example:
        >>> transport = Transport()
        >>> transport.is_divided, list(transport.own(num_stages=3))
        (False, [0, 1, 2])
        >>> transport.send("state", 0, 1, torch.ones(2))
        >>> transport.receive("state", 0, 1)
        tensor([1., 1.])
    """

    def __init__(self, stages: Ranks | None = None, replicas: Ranks | None = None) -> None:
        self.stages, self.replicas = stages or Ranks(), replicas or Ranks()
        self.has_lanes = False
        self._messages = Messages(self.stages, KINDS)
        self._letters: dict[tuple[str, int, int], tuple[Tensor, torch.cuda.Event | None]] = {}

    @classmethod
    def join(cls, rank: int, num_ranks: int, num_stages: int, key: str) -> "Transport":
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
        expected = f"a number that divides the {num_ranks} ranks, as each stage has a process of its own"
        advice = f"Set runner.devices={max(num_parts, 1) * num_stages}, or {key}.processes=false."
        require(bool(num_parts) and not rest, f"{key}.stages", num_stages, expected, advice)
        return cls(*stages_and_parts(rank, num_ranks, num_stages))

    @property
    def is_divided(self) -> bool:
        """Whether other stages belong to other processes."""
        return self.stages.size > 1

    def own(self, num_stages: int) -> Sequence[int]:
        """Return the stages that this process runs."""
        return (self.stages.rank,) if self.is_divided else range(num_stages)

    def send(self, kind: str, source: int, target: int, tensor: Tensor) -> None:
        """Hand a contiguous tensor on, and do not wait for it to arrive; it must stay as it is."""
        if self.is_divided:
            self._messages.send(kind, target, tensor)
            return
        event = torch.cuda.current_stream(tensor.device).record_event() if self.has_lanes else None
        self._letters[kind, source, target] = tensor, event

    def expect(self, kind: str, source: int, target: int, blank: Tensor) -> None:
        """Be ready for a tensor, which `blank` takes where it comes from another process."""
        if self.is_divided:
            self._messages.expect(kind, source, blank)

    def receive(self, kind: str, source: int, target: int) -> Tensor:
        """Wait for the tensor that `expect` was called for, and return it."""
        if self.is_divided:
            return self._messages.receive(kind, source)
        tensor, event = self._letters.pop((kind, source, target))
        if event is not None:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(event)
            # Its memory belongs to the sender's stream, which must not use it again before this one is done with it.
            tensor.record_stream(stream)
        return tensor

    def finish(self) -> None:
        """Wait until everything that was sent has left, and forget what a step that has failed has left behind."""
        self._messages.finish()
        self._letters.clear()

    def gathered(self, own: dict[str, T]) -> dict[str, T]:
        """Return the entries that all stages' processes have, as one mapping; every process has keys of its own."""
        return {key: value for entries in self.stages.gather(own) for key, value in entries.items()}


class Exchange:
    """How processes exchange values where the layers are divided into equal parts, one for each, in their order.

    A process relaxes its own part of the finest grid. The coarser grids, N/c layers and fewer, are solved by each
    process as a whole. "Next" and "before" are meant in the order in which a solve advances: adjoints begin at the last
    layers.

    Args:
        group: the processes, as a torch.distributed group or as `Ranks`; None: this one has all layers.
        is_mirrored: whether values are handed on from the last rank to the first, as adjoints are.

    Attributes:
        part: number of this process's part in that order, from 0.
        num_parts: how many parts there are.

    Example:
        >>> exchange = Exchange(Ranks(rank=1, size=4), is_mirrored=True)
        >>> exchange.part, exchange.num_parts
        (2, 4)
    """

    def __init__(self, group: Any = None, is_mirrored: bool = False) -> None:
        self._ranks = Ranks() if group is None else group if isinstance(group, Ranks) else Ranks.of(group)
        self._is_mirrored = is_mirrored
        self.num_parts = self._ranks.size
        self.part = self._at(self._ranks.rank)

    def pass_on(self, last: Tensor) -> Tensor | None:
        """Send the last value (b, ...) of this part to the next part, and return that of the part before, if any."""
        return hand_on(self._ranks, last, is_backward=self._is_mirrored)

    def gather(self, own: Tensor) -> Tensor:
        """Return the values (k, ...) of all parts along the first axis, in the order of their layers."""
        return torch.cat(self._ranks.gather_tensors(own)) if self.num_parts > 1 else own

    def norm(self, own: Tensor) -> Tensor:
        """Return the Euclidean norm () over all parts, from the norm () of each one's values."""
        return self._ranks.total(own.square()).sqrt() if self.num_parts > 1 else own

    def origin(self, value: Tensor) -> Tensor:
        """Return what the process of the first part has given, (b, ...): the value at which the recursion begins."""
        return self._ranks.broadcast_one(value, self._at(0)) if self.num_parts > 1 else value.detach()

    def join(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples of all processes (B, ...), one rank's after the other, and which are this one's, (B,)."""
        rank = self._ranks.rank
        whole, owners = self._ranks.gather_rows([rows.detach(), torch.full((len(rows),), rank)])
        return whole, owners == rank

    def _at(self, part: int) -> int:
        """Return the rank of a part, and the part of a rank."""
        return self.num_parts - 1 - part if self._is_mirrored else part


def exchanges() -> tuple[Exchange, Exchange] | None:
    """Return the exchange of states and that of adjoints between all ranks of the run; None where there is one alone.

    Example:
        >>> exchanges() is None
        True
    """
    return (Exchange(all_ranks()), Exchange(all_ranks(), is_mirrored=True)) if all_ranks().size > 1 else None
