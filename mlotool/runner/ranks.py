"""The processes of one run, and what they tell each other."""

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.problem.interface import Vector
from mlotool.runner.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

BUCKET_BYTES = 25 * 2**20
"""What one all-reduce carries; the next bucket is packed while it is under way."""

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others, an evaluation by rank 0 included."""


class Ranks:
    """The processes of a run, seen from one of them. Every method but the properties is called by all, in one order.

    Args:
        rank: this one's number.
        size: how many there are; 1 talks to nobody.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def is_first(self) -> bool:
        """Whether this one writes the files."""
        return self.rank == 0

    def mean(self, vector: Vector) -> Vector:
        """Return the mean over ranks, the same bits on all; differentiable, and its backward is the same mean.

        This is the one function for gradients, cotangents, second-order products and hypergradients.

        Args:
            vector: tensors of the same shapes on all ranks; they are left as they are.

        Cost: a copy, and an all-reduce for each 25 MiB of a dtype.
        """
        if self.size == 1 or not vector:
            return vector
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in vector):
            found: tuple[Tensor, ...] = _Mean.apply(self.size, *vector)
            return found
        return _exchanged(vector, self.size)

    def first(self, value: T) -> T:
        """Return what rank 0 has."""
        if self.size == 1:
            return value
        box = [value if self.is_first else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def of_first(self, compute: Callable[[], T]) -> T:
        """Let rank 0 compute something, and return it on all."""
        return self.first(compute() if self.is_first else None)  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return what each rank has, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def mesh(self, device: torch.device) -> "DeviceMesh":
        """Return all ranks as a row, for tensors on such a device."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device.type, (self.size,))

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each number over ranks."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """Say whether the flag is set on any rank."""
        return bool(self.largest([float(flag)])[0])


@contextmanager
def joined(world: World | None, device: torch.device) -> Iterator[Ranks]:
    """Join the processes of a run: gloo, and NCCL for tensors on GPUs.

    They stay joined until this process ends: the jobs of a sweep follow each other.

    Args:
        world: where this process stands; None is alone.
        device: where it computes.
    """
    if world is None or world.size == 1:
        yield Ranks()
        return
    if not dist.is_initialized():
        _join(world, device)
    try:
        yield Ranks(world.rank, world.size)
    except BaseException:
        # The others may be lost: saying goodbye would wait for them.
        atexit.unregister(_leave)
        raise


def _join(world: World, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # What torchrun has set is more than address and port: its agent may keep the store.
    place = "env://" if "RANK" in os.environ else f"tcp://{world.address}:{world.port}"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=place,
            rank=world.rank,
            world_size=world.size,
            timeout=TIMEOUT,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"Rank {world.rank} of {world.size} found no way to {world.address}:{world.port} ({error}); expected that "
            "all ranks reach rank 0 there. See that they are all started, and that MASTER_ADDR and MASTER_PORT (or "
            "GLOO_SOCKET_IFNAME) name a network that they share."
        ) from error
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class _Mean(torch.autograd.Function):
    """The mean over ranks; its transpose is the mean over ranks."""

    @staticmethod
    def forward(ctx: Any, size: int, *vector: Tensor) -> tuple[Tensor, ...]:
        """Exchange."""
        ctx.size = size
        return tuple(_exchanged(vector, size))

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> tuple[Any, ...]:
        """Exchange the cotangents, in a way that can be differentiated again."""
        if torch.is_grad_enabled():
            return None, *_Mean.apply(ctx.size, *cotangent)
        return None, *_exchanged(cotangent, ctx.size)


def _exchanged(vector: Vector, size: int) -> list[Tensor]:
    found: list[Tensor] = list(vector)
    waiting = []
    for numbers in _buckets(vector):
        flat = torch.cat([vector[number].detach().reshape(-1) for number in numbers])
        waiting.append((numbers, flat, dist.all_reduce(flat, async_op=True)))
    for numbers, flat, work in waiting:
        work.wait()
        flat.div_(size)
        begin = 0
        for number in numbers:
            like = vector[number]
            found[number] = flat[begin : begin + like.numel()].view(like.shape)
            begin += like.numel()
    return found


def _buckets(vector: Vector) -> list[list[int]]:
    """Return the positions of the tensors that travel together: of one dtype and device, in order."""
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    closed: list[list[int]] = []
    for number, tensor in enumerate(vector):
        kind = tensor.dtype, tensor.device
        numbers, filled = open_buckets.get(kind, ([], 0))
        size = tensor.numel() * tensor.element_size()
        if numbers and filled + size > BUCKET_BYTES:
            closed.append(numbers)
            numbers, filled = [], 0
        open_buckets[kind] = [*numbers, number], filled + size
    return closed + [numbers for numbers, _ in open_buckets.values()]
