"""What all processes of a group do together: means, sums, broadcasts, gathers, agreement."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mlotool.core.errors import MlotoolError, RunError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# What gloo, NCCL and the store of torch.distributed say of a process that no longer answers.
_SIGNS = re.compile(r"connect|peer|socket|broken pipe|remote process|timed? ?out", re.IGNORECASE)


@contextmanager
def naming_the_lost(word: str, own: int, other: int | None = None) -> Iterator[None]:
    """Turn what torch says of a process that is gone into what a user can do.

    Args:
        word: what the processes have: "rank" or "stage".
        own: the number of this one.
        other: of the one that it waits for; None where it waits for all. Then only an error that speaks of a
            connection is taken for a lost process.

    Example:
        >>> with naming_the_lost("stage", 0, 1):
        ...     raise RuntimeError("Connection closed by peer. More of it")
        Traceback (most recent call last):
            ...
        mlotool.core.errors.RunError: Stage 0 has lost the process of stage 1 (Connection closed by peer); expected ...
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, MlotoolError) or (other is None and not _SIGNS.search(str(error))):
            raise
        lost = f"another {word}" if other is None else f"{word} {other}"
        raise RunError(
            f"{word.capitalize()} {own} has lost the process of {lost} ({str(error).split('. ')[0]}); expected it to "
            "stay until the run ends. Look at the output of that process, and continue with resume=auto."
        ) from error


def begin_exchange(
    tensors: Sequence[Tensor], begin: Callable[[Tensor], Callable[[], object]]
) -> Callable[[], list[Tensor]]:
    """Begin an exchange that works in place on 1-D tensors, one a dtype and device; `tensors` stay as they are.

    Args:
        tensors: of any shapes.
        begin: begins the exchange of a flat tensor, and returns what waits for its end.

    Returns:
        What waits for all of it, and returns tensors of the same shapes, in order: views of the flat ones.

    Example:
        >>> def doubled(flat):
        ...     flat.mul_(2)
        ...     return lambda: None
        >>> begin_exchange([torch.ones(2), torch.ones(1, 1)], doubled)()
        [tensor([2., 2.]), tensor([[2.]])]
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(number)
    waiting = []
    for numbers in kinds.values():
        flat = torch.cat([tensors[number].detach().reshape(-1) for number in numbers])
        waiting.append((numbers, flat, begin(flat)))

    def finish() -> list[Tensor]:
        results = list(tensors)
        for numbers, flat, wait in waiting:
            wait()
            for number, part in zip(numbers, flat.split([tensors[number].numel() for number in numbers]), strict=True):
                results[number] = part.view(tensors[number].shape)
        return results

    return finish


T = TypeVar("T")

# r: rows of this rank, R: of all ranks


class Ranks:
    """A group of processes, seen from one of them.

    Every process of the group must call each method, in the same order. Properties are each process's own affair.

    Each of them raises a `RunError` where another process is gone.

    Args:
        rank: number of this process in the group.
        size: number of processes; with 1 there is nobody to exchange with, and no process group is needed, except by
            `broadcast` and `gather_flat`.
        group: of torch.distributed; None stands for all processes of the run.
        word: what a process is called in messages: "rank", or "stage" where each process has a stage.

    Example:
        >>> alone = Ranks()
        >>> alone.mean([torch.tensor(2.0)]), alone.gather("text"), alone.is_first
        ([tensor(2.)], ['text'], True)
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, word: str = "rank") -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.word = word

    @classmethod
    def of(cls, group: Any) -> "Ranks":
        """Return a torch.distributed group as `Ranks`; this process is in the group."""
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def is_first(self) -> bool:
        """Whether this one writes the files."""
        return self.rank == 0

    @property
    def reduce(self) -> Callable[[Sequence[Tensor]], Sequence[Tensor]] | None:
        """What a Program takes as its `reduce`: the mean, or None where this process is alone."""
        return self.mean if self.size > 1 else None

    def mean(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the means over ranks, the same bits on all; without a gradient (`problem/rank_mean.py` gives it one).

        This is the one function for gradients, cotangents, second-order products and hypergradients.

        Args:
            tensors: of the same shapes on all ranks; they are left as they are.

        Cost: a copy, and an all-reduce for each dtype.
        """
        if self.size == 1 or not tensors:
            return tensors

        def begin(flat: Tensor) -> Callable[[], object]:
            work: Any = dist.all_reduce(flat, group=self.group, async_op=True)

            def wait() -> None:
                work.wait()
                flat.div_(self.size)

            return wait

        with self._naming_the_lost():
            return begin_exchange([tensor.detach() for tensor in tensors], begin)()

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor, which has one shape on all; it has no gradient."""
        tensor = tensor.detach().clone()
        if self.size > 1:
            with self._naming_the_lost():
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return, for each of a list of numbers, the largest that any rank has; the lists have one length."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with self._naming_the_lost():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def first(self, value: T) -> T:
        """Return the value that rank 0 has, on all ranks; it may be any object that can be pickled."""
        if self.size == 1:
            return value
        box = [value if self.is_first else None]
        with self._naming_the_lost():
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]  # type: ignore[return-value]

    def of_first(self, compute: Callable[[], T]) -> T:
        """Call a function on rank 0 alone, and return its result on all ranks; it must be possible to pickle that."""
        return self.first(compute() if self.is_first else None)  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank; they may be any objects that can be pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._naming_the_lost():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank, without a gradient; they have one shape and dtype."""
        if self.size == 1:
            return [tensor.detach()]
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._naming_the_lost():
            dist.all_gather(parts, tensor.detach().contiguous(), group=self.group)
        return parts

    def gather_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of all ranks (R, ...), one rank's after the other.

        Args:
            tensors: (r, ...) each, of one number of rows, which may be another one on other ranks.
        """
        if self.size == 1:
            return list(tensors)
        sizes = [int(size) for size in self.gather_tensors(torch.tensor([len(tensors[0])]))]
        whole = []
        for tensor in tensors:
            padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
            padded[: len(tensor)] = tensor
            parts = self.gather_tensors(padded)
            whole.append(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]))
        return whole

    def gather_flat(self, flat: Tensor) -> Tensor:
        """Return the tensors (n,) of all ranks as rows of one tensor (size, n), without a copy of each."""
        whole = flat.new_empty(self.size * len(flat))
        with self._naming_the_lost():
            dist.all_gather_into_tensor(whole, flat, group=self.group)
        return whole.view(self.size, -1)

    def broadcast(self, tensors: Sequence[Sequence[Tensor]]) -> None:
        """Give all ranks what each one has.

        Args:
            tensors: by rank, of the same shapes everywhere; filled in place where they are another rank's.
        """
        waiting = [begin_exchange(members, self._begin_broadcast(source)) for source, members in enumerate(tensors)]
        for source, finish in enumerate(waiting):
            with naming_the_lost(self.word, self.rank, source):
                values = finish()
            if source != self.rank:
                for tensor, value in zip(tensors[source], values, strict=True):
                    tensor.detach().copy_(value)

    def broadcast_one(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of one rank on all ranks; it has no gradient.

        Args:
            tensor: of one shape on all ranks.
            source: the rank whose tensor is returned.
        """
        tensor = tensor.detach().clone()
        if self.size > 1:
            with naming_the_lost(self.word, self.rank, source):
                dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def _begin_broadcast(self, source: int) -> Callable[[Tensor], Callable[[], object]]:
        def begin(flat: Tensor) -> Callable[[], object]:
            work: Any = dist.broadcast(flat, group=self.group, group_src=source, async_op=True)
            return work.wait

        return begin

    def _naming_the_lost(self) -> AbstractContextManager[None]:
        return naming_the_lost(self.word, self.rank)


def all_ranks() -> Ranks:
    """Return all processes of the run; this one alone where it has joined no others.

    Example:
        >>> all_ranks().size
        1
    """
    is_joined = dist.is_available() and dist.is_initialized()
    return Ranks(dist.get_rank(), dist.get_world_size()) if is_joined else Ranks()


def stages_and_parts(rank: int, num_ranks: int, num_stages: int) -> tuple[Ranks, Ranks]:
    """Divide all processes by `rank = part * num_stages + stage`; every process of the run must call it.

    Args:
        rank: number of this process among all.
        num_ranks: number of all processes; a multiple of `num_stages`.
        num_stages: K.

    Returns:
        Two groups that this process is in: the K processes that have the stages of its part of the batch, and the
        `num_ranks / K` processes that have its stage, one for each part of the batch.

    Example:
        >>> stages, parts = stages_and_parts(rank=1, num_ranks=2, num_stages=2)
        >>> (stages.rank, stages.size), (parts.rank, parts.size)
        ((1, 2), (0, 1))
    """
    part, stage = divmod(rank, num_stages)
    num_parts = num_ranks // num_stages
    if num_parts == 1:
        return Ranks(stage, num_stages, word="stage"), Ranks()
    # All processes have to make all groups, in one order.
    of_parts = [dist.new_group(list(range(value * num_stages, (value + 1) * num_stages))) for value in range(num_parts)]
    of_stages = [dist.new_group(list(range(value, num_ranks, num_stages))) for value in range(num_stages)]
    return Ranks(stage, num_stages, of_parts[part], "stage"), Ranks(part, num_parts, of_stages[stage])


def row_of(ranks: Ranks, device: torch.device) -> "DeviceMesh":
    """Return all processes of a run as a one-dimensional device mesh, for sharded tensors; every process must call it.

    Args:
        ranks: all processes of the run, which have joined a process group.
        device: of the tensors.

    Example:
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> row_of(all_ranks(), torch.device("cpu")).shape
        (1,)
        >>> dist.destroy_process_group()
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (ranks.size,))


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
