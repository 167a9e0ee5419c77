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
    """Divide all processes by `rank = part * num_stages + stage`; called by all of them.

    Args:
        rank: of this process.
        num_ranks: of all; a multiple of `num_stages`.
        num_stages: K.

    Returns:
        The K stages of this process's part of the batch, and the parts of the batch of this process's stage.
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
    """Return all processes of a run as a row, for tensors on such a device; called by all of them.

    Args:
        ranks: all of the run.
        device: of the tensors.
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (ranks.size,))
