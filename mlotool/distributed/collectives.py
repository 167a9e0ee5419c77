"""What all processes of a group do together: means, sums, broadcasts, gathers, agreement."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mlotool.distributed.buckets import begin_exchange
from mlotool.distributed.lost_rank import naming_the_lost

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

        Cost: a copy, and an all-reduce for each 25 MiB of a dtype.
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

    def any(self, flag: bool) -> bool:
        """Say whether the flag is set on any rank."""
        return bool(self.largest([float(flag)])[0])

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
        found: list[Any] = [None] * self.size
        with self._naming_the_lost():
            dist.all_gather_object(found, value, group=self.group)
        return found

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
        found = []
        for tensor in tensors:
            padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
            padded[: len(tensor)] = tensor
            parts = self.gather_tensors(padded)
            found.append(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]))
        return found

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
        waiting = [begin_exchange(own, self._begin_broadcast(source)) for source, own in enumerate(tensors)]
        for source, finish in enumerate(waiting):
            with naming_the_lost(self.word, self.rank, source):
                found = finish()
            if source != self.rank:
                for each, value in zip(tensors[source], found, strict=True):
                    each.detach().copy_(value)

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

    def _naming_the_lost(self) -> naming_the_lost:
        return naming_the_lost(self.word, self.rank)
