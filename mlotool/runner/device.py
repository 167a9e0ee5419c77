"""Where a run computes."""

from typing import Any

import torch

from mlotool.core.errors import ConfigError
from mlotool.program import Program

ACCELERATORS = ("auto", "cpu", "gpu")


def find_device(runner: Any) -> torch.device:
    """Return the device of `runner.accelerator`; `auto` is the first GPU where there is one.

    Raises:
        ConfigError: there is no such device, or `runner.devices` is not 1.
    """
    devices = runner.devices if "devices" in runner else 1
    if devices != 1:
        raise ConfigError(
            f"runner.devices: found {devices}; expected 1, the only number this version runs on. "
            "Set runner.devices=1, and use a sweep to keep several devices busy."
        )
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
    return torch.device("cuda", 0) if has_gpu and runner.accelerator != "cpu" else torch.device("cpu")


def place(program: Program, device: torch.device) -> None:
    """Move a program's modules and batches to `device`."""
    for problem in program.problems.values():
        problem.module.to(device)
        if problem.stream is not None:
            problem.stream.to(device)
