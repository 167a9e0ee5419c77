"""Messages from one process to another."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlotool.distributed.collectives import Ranks, naming_the_lost


class Messages:
    """Messages between the processes of a group. A message is known by its kind, its sender and its receiver.

    They are sent and received while the computation goes on. Two processes must call `expect` and `send` in the same
    order for what they have for each other, and never have two messages of one kind in one direction under way.

    Args:
        ranks: the group; its `word` names the processes in errors.
        kinds: the kinds of messages; the position of a kind is its tag in torch.distributed.

    Raises:
        RunError: in each method, where the other process is gone.

    Example:
        Process 0 sends a state to process 1, which runs the second line:

            messages.send("state", target=1, tensor=torch.ones(2))
            messages.expect("state", source=0, blank=torch.empty(2)); state = messages.receive("state", source=0)

        A process that has sent nothing has nothing to wait for:

        >>> messages = Messages(Ranks(rank=0, size=2, word="stage"), kinds=["state", "slope"])
        >>> messages.finish()
    """

    def __init__(self, ranks: Ranks, kinds: Sequence[str]) -> None:
        self._ranks = ranks
        self._tags = {kind: tag for tag, kind in enumerate(kinds)}
        # Of point-to-point exchanges all use the connections of the whole run, whatever the group.
        group = ranks.group
        self._numbers = [value if group is None else dist.get_global_rank(group, value) for value in range(ranks.size)]
        # A message that is under way needs its tensor.
        self._leaving: list[tuple[Any, Tensor, int]] = []
        self._coming: dict[tuple[str, int], tuple[Any, Tensor]] = {}

    def send(self, kind: str, target: int, tensor: Tensor) -> None:
        """Send without waiting.

        Args:
            kind: of the message.
            target: the receiving rank.
            tensor: contiguous; it must stay as it is until `finish`.
        """
        assert tensor.is_contiguous()
        with self._naming(target):
            work = dist.isend(tensor, self._numbers[target], tag=self._tags[kind])
        self._leaving.append((work, tensor, target))

    def expect(self, kind: str, source: int, blank: Tensor) -> None:
        """Begin to receive.

        Args:
            kind: of the message.
            source: the sending rank.
            blank: takes the tensor, once it has been received.
        """
        with self._naming(source):
            work = dist.irecv(blank, self._numbers[source], tag=self._tags[kind])
        self._coming[kind, source] = work, blank

    def receive(self, kind: str, source: int) -> Tensor:
        """Wait for the message that `expect` has begun to receive, and return it."""
        work, tensor = self._coming.pop((kind, source))
        with self._naming(source):
            work.wait()
        return tensor

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _, target in self._leaving:
            with self._naming(target):
                work.wait()
        self._leaving.clear()

    def _naming(self, other: int) -> AbstractContextManager[None]:
        return naming_the_lost(self._ranks.word, self._ranks.rank, other)


def hand_on(ranks: Ranks, own: Tensor, *, is_backward: bool = False) -> Tensor | None:
    """Send a tensor to the next rank, and return that of the rank before; called by all.

    Args:
        ranks: in whose order it is handed on; the last rank sends nothing.
        own: of this rank, of one shape on all.
        is_backward: hand on from the last rank to the first.

    Returns:
        None for the first rank (`is_backward`: the last one).

    Example:
        >>> hand_on(Ranks(), torch.ones(2)) is None
        True
    """
    own, step, pending = own.contiguous(), -1 if is_backward else 1, []
    source, target = ranks.rank - step, ranks.rank + step
    received = torch.empty_like(own) if 0 <= source < ranks.size else None
    if received is not None:
        pending.append(dist.P2POp(dist.irecv, received, group=ranks.group, group_peer=source))
    if 0 <= target < ranks.size:
        pending.append(dist.P2POp(dist.isend, own, group=ranks.group, group_peer=target))
    for work in dist.batch_isend_irecv(pending) if pending else ():
        work.wait()
    return received
