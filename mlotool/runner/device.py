"""Where a run computes."""

from typing import Any

import torch

from mlotool.core.errors import ConfigError
from mlotool.program import Program

ACCELERATORS = ("auto", "cpu", "gpu")


def count_devices(runner: Any) -> int:
    """Return how many processes `runner.devices` asks for on this machine; `auto` is a GPU each, or one CPU.

    Raises:
        ConfigError: there are not as many GPUs.
    """
    devices = runner.devices if "devices" in runner else 1
    if devices == 1:
        return 1
    num_gpus = torch.cuda.device_count() if find_device(runner).type == "cuda" else 0
    if devices == "auto":
        return max(num_gpus, 1)
    if not isinstance(devices, int) or devices < 1:
        raise ConfigError(
            f"runner.devices: found {devices!r}; expected a whole number of at least 1, or auto. "
            "Correct runner.devices."
        )
    if 0 < num_gpus < devices:
        raise ConfigError(
            f"runner.devices: found {devices}, but torch sees {num_gpus} GPU(s); expected no more than there are. Set "
            f"runner.devices={num_gpus}, or runner.accelerator=cpu."
        )
    return devices


def find_device(runner: Any, local_rank: int = 0) -> torch.device:
    """Return the device of `runner.accelerator`; `auto` is a GPU where there is one.

    Args:
        runner: the config's node.
        local_rank: number of this process on its machine, and so of its GPU.

    Raises:
        ConfigError: there is no such device.
    """
    if runner.accelerator not in ACCELERATORS:
        raise ConfigError(
            f"runner.accelerator: found '{runner.accelerator}'; expected one of {', '.join(ACCELERATORS)}. Correct it."
        )
    has_gpu = torch.cuda.is_available()
    if runner.accelerator == "gpu" and not has_gpu:
        raise ConfigError(
            "runner.accelerator: found 'gpu', but torch sees no CUDA device; "
            "set runner.accelerator=auto, or install a torch build for your GPU."
        )
    if has_gpu and runner.accelerator != "cpu" and local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"runner.devices: found a process number {local_rank} on this machine, but torch sees "
            f"{torch.cuda.device_count()} GPU(s); expected a GPU each. Start fewer, or set runner.accelerator=cpu."
        )
    return torch.device("cuda", local_rank) if has_gpu and runner.accelerator != "cpu" else torch.device("cpu")


def place(program: Program, device: torch.device) -> None:
    """Move a program's modules and batches to `device`."""
    for problem in program.problems.values():
        problem.module.to(device)
        if problem.stream is not None:
            problem.stream.to(device)
        if problem.parallel is not None:
            problem.parallel.to(device)
    program.random.cover(program.devices)
