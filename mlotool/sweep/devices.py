"""Which devices a worker's jobs see, so that two jobs do not share one by accident."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from mlotool.core.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that this process may use, by number or name; none where there is no NVIDIA driver."""
    listed = environment.get(VARIABLE)
    if listed is not None:
        return [each.strip() for each in listed.split(",") if each.strip() not in ("", "-1", "NoDevFiles")]
    if shutil.which("nvidia-smi") is None:
        return []
    # Not torch: its import takes seconds, and would open the devices here.
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.split() if result.returncode == 0 else []


def worker_devices(devices: Sequence[str], num_workers: int, *, per_job: int, jobs_per_device: int) -> list[list[str]]:
    """Return each worker's devices; empty lists where there are none to share out.

    Args:
        devices: to share out.
        num_workers: jobs at a time.
        per_job: devices that one job takes.
        jobs_per_device: jobs that may use one device at a time.

    Raises:
        ConfigError: there are too few.

    Example:
        >>> worker_devices(["0", "1", "2", "3"], 2, per_job=2, jobs_per_device=1)
        [['0', '1'], ['2', '3']]
    """
    if not devices:
        return [[] for _ in range(num_workers)]
    groups = [list(devices[begin : begin + per_job]) for begin in range(0, len(devices) - per_job + 1, per_job)]
    possible = len(groups) * jobs_per_device
    if num_workers > possible:
        share = -(-num_workers // len(groups)) if groups else None
        advice = f"sweep.workers={possible}" if possible else f"runner.devices={len(devices)}"
        raise ConfigError(
            f"sweep.workers: found {num_workers} with the devices {', '.join(devices)}, of which a job takes "
            f"{per_job}; expected at most {possible} workers, as others would share a device. Set {advice}"
            + (f", or sweep.jobs_per_device={share} if they may share." if share else ".")
        )
    return [groups[index % len(groups)] for index in range(num_workers)]
