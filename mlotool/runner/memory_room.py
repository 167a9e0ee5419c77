"""Whether one more run fits into the memory of this process's device."""

import gc
from pathlib import Path

import torch

RESERVE = 0.25
"""Share of the memory that stays free: for what evaluations and checkpoints take, and for other processes."""

_MEMINFO = Path("/proc/meminfo")
_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""Limit and use of a container or a cluster's job, by the versions of control groups."""


class MemoryRoom:
    """Watches how much memory each run takes that begins.

    A run is expected to take as much as the largest one before it, and as much again while it trains: its gradients,
    and what is kept of its loss's evaluation.

    Args:
        device: where the runs compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._largest = 0
        self._free = self._look()

    def takes_one_more(self) -> bool:
        """Say, after a run has begun, whether one more is expected to fit; it is where nothing is known."""
        before, self._free = self._free, self._look()
        if before is None or self._free is None:
            return True
        free, total = self._free
        self._largest = max(self._largest, before[0] - free)
        return free - 2 * self._largest >= RESERVE * total

    def _look(self) -> tuple[int, int] | None:
        """Return the bytes that are free, and all."""
        if self._device.type == "cuda":
            gc.collect()
            free, total = torch.cuda.mem_get_info(self._device)
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return free + unused, total
        try:
            lines = _MEMINFO.read_text().splitlines()
            found = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
            free, total = found["MemAvailable"], found["MemTotal"]
        except (OSError, KeyError, ValueError, IndexError):
            return None
        for limit, use in _GROUPS:
            try:
                most, used = int(limit.read_text()), int(use.read_text())
            except (OSError, ValueError):
                # "max" is none.
                continue
            if most < total:
                free, total = min(free, most - used), most
        return free, total
