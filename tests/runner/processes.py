"""Processes that talk by gloo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from mlotool.runner import run_config
from tests import forked

T = TypeVar("T")


def run_ranks(
    main: Callable[..., None], num_ranks: int, folder: Path, *arguments: Any, meanwhile: Callable[[], T]
) -> tuple[T, list[Any]]:
    """Call `main(folder, *arguments)` on ranks.

    Args:
        main: a function of a module; it leaves `rank_<rank>.pt` in the folder.
        num_ranks: how many.
        folder: an empty one.
        arguments: further ones.
        meanwhile: what this process computes.

    Returns:
        What `meanwhile` returned, and what the ranks have left.
    """
    shared = {**run_config._shared_environment(num_ranks), "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(num_ranks):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(forked.start(main, folder, *arguments, environment=environment))
        found = meanwhile()
        assert [process.wait(timeout=1500) for process in processes] == [0] * num_ranks
    finally:
        for process in processes:
            process.kill()
    return found, [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(num_ranks)]
