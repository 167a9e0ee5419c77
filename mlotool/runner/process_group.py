"""How the processes of one run find each other, and part."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from mlotool.core.errors import ConfigError
from mlotool.distributed.collectives import Ranks
from mlotool.runner.world import World

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others, an evaluation by rank 0 included."""


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
