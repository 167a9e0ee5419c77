"""Analyses at the end of a run: arrays for the report, and numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.program import Program
from mlotool.runner.evaluation import find_split, whole_batches


def run_analyses(
    analyses: Mapping[str, Any], program: Program, data: Any, artifacts: Path, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Run each analysis over its split in eval mode.

    Tensors of a result go to `artifacts/<analysis>.npz`, texts to `artifacts/<analysis>_<name>.txt`; 0-D tensors are
    returned as `<analysis>/<name>`.

    Args:
        analyses: by name, something with `function`, `roles`, `split` and `batch_size`.
        program: whose problems play the roles.
        data: has the splits.
        artifacts: the folder of the arrays.
        device: where the modules are.
    """
    numbers: dict[str, float] = {}
    for name, analysis in analyses.items():
        batches = whole_batches(find_split(data, analysis.split), analysis.batch_size, device)
        with torch.no_grad():
            result = dict(analysis.function(batches, **_bind(name, analysis.roles, program)))
        for key in [key for key, value in result.items() if isinstance(value, str)]:
            (artifacts / f"{name}_{key}.txt").write_text(f"{result.pop(key)}\n", encoding="utf-8")
        arrays = {key: value for key, value in result.items() if _as_tensor(value).dim() > 0}
        if arrays:
            numpy.savez(artifacts / f"{name}.npz", **{key: _as_array(value) for key, value in arrays.items()})
        numbers.update({f"{name}/{key}": float(value) for key, value in result.items() if key not in arrays})
    return numbers


def _bind(name: str, roles: Mapping[str, Any], program: Program) -> dict[str, BoundModule]:
    bound = {}
    for role, value in roles.items():
        problem = value if isinstance(value, str) else value["problem"]
        if problem not in program.problems:
            raise ConfigError(
                f"analyses.{name}.roles.{role}: found '{problem}'; expected a problem: {', '.join(program.problems)}. "
                "Correct the role."
            )
        bound[role] = BoundModule(program.problems[problem].module, training=False)
    return bound


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _as_array(value: Any) -> Any:
    return _as_tensor(value).detach().cpu().numpy()
