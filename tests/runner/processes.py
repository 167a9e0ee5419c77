"""Two processes that talk by gloo."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def run_two(module: str, folder: Path, *words: str, meanwhile: Callable[[], T]) -> tuple[T, Any, Any]:
    """Run `python -m MODULE FOLDER WORDS` on two ranks.

    Args:
        module: leaves `rank_<rank>.pt` in the folder.
        folder: an empty one.
        words: further arguments.
        meanwhile: what this process computes.

    Returns:
        What `meanwhile` returned, and what the two ranks have left.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-m", module, str(folder), *words]
    processes = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        found = meanwhile()
        assert [process.wait(timeout=1500) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    first, second = (torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2))
    return found, first, second
