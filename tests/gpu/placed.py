"""Programs on a device, and what they come to, on the CPU to be compared."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mlotool.program import Program, Schedule

CPU = torch.device("cpu")


def placed(program: Program, device: torch.device, dtype: torch.dtype | None = None) -> Program:
    """Return the program on a device; its batches as `dtype`, None leaves theirs."""
    program.to(device)
    for problem in program.problems.values():
        if dtype is not None and problem.stream is not None:
            problem.stream.to(device, dtype)
    assert all(tensor.device == device for each in program.problems.values() for tensor in each.theta.values())
    return program


def follow(program: Program, num_ticks: int, seed: int = 0) -> Program:
    """Take ticks; the random numbers begin at the seed."""
    program.random.manual_seed(seed)
    schedule = Schedule(program)
    for _ in range(num_ticks):
        schedule.tick()
    return program


def on_the_cpu(state: Any) -> Any:
    """Return a state as it comes from a checkpoint: with copies of its tensors on the CPU."""
    return tree_map(lambda each: each.detach().cpu().clone() if isinstance(each, Tensor) else each, state)


def parameters(program: Program) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers, by problem and name, on the CPU."""
    return {
        f"{name}.{key}": tensor.detach().cpu().clone()
        for name, problem in program.problems.items()
        for key, tensor in problem.module.state_dict().items()
    }


def relative_error(found: Mapping[str, Tensor] | Tensor, expected: Mapping[str, Tensor] | Tensor) -> float:
    """Return the norm of the difference over that of what is expected, on whatever devices they are."""
    a, b = _flat(found), _flat(expected)
    length = float(b.norm())
    assert length > 0
    return float((a - b).norm()) / length


def cosine(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the cosine of the angle between them."""
    return float(torch.nn.functional.cosine_similarity(_flat(found), _flat(expected), dim=0))


def _flat(tensors: Mapping[str, Tensor] | Tensor) -> Tensor:
    values = [tensors] if isinstance(tensors, Tensor) else [tensors[key] for key in sorted(tensors)]
    return torch.cat([tensor.detach().cpu().double().reshape(-1) for tensor in values])
