"""Which processes form which groups."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mlotool.distributed.collectives import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
    of_parts = [dist.new_group(list(range(each * num_stages, (each + 1) * num_stages))) for each in range(num_parts)]
    of_stages = [dist.new_group(list(range(each, num_ranks, num_stages))) for each in range(num_stages)]
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
