"""Analyses at the end of a run: arrays for the report, and numbers."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from mlotool.config.schema import MAX_NAME, is_plain_name
from mlotool.core.bound_module import BoundModule
from mlotool.core.described import kind_of
from mlotool.core.equal_weights import are_equal
from mlotool.core.errors import ConfigError
from mlotool.core.files import replacing, write_text
from mlotool.core.user_code import Call, WrongResultError, noted
from mlotool.program import Program
from mlotool.runner.evaluation import NUM_REHEARSED, Batches, find_split

_EXPECTED = "tensors, numbers or texts by name"
_AT_THE_END = "Correct it, and repeat what comes after the training by resume=auto: the run is kept."

MIN_STEPS = 100
"""Of what gives the weights: before them it is near its start."""


def run_analyses(
    built: Any, artifacts: Path, device: torch.device | str, log: Callable[[dict[str, float]], None]
) -> None:
    """Run each analysis over its split in eval mode; one that fails keeps no other from its results.

    Tensors of a result go to `artifacts/<analysis>.npz`, texts to `artifacts/<analysis>_<name>.txt`; 0-D tensors are
    logged as `<analysis>/<name>`.

    Args:
        built: has `analyses` by name, something with `function`, `roles`, `split` and `batch_size`; the `program`,
            whose problems play the roles; and `data` with the splits.
        artifacts: the folder of the arrays.
        device: where the modules are.
        log: takes the numbers of each.

    Raises:
        BaseException: the first error, once all have been called.
    """
    first: BaseException | None = None
    for name, analysis in built.analyses.items():
        batches = Batches(find_split(built.data, analysis.split), analysis.batch_size, device)
        try:
            result = _result(name, analysis, built.program, batches, _AT_THE_END)
            shaping = [each for each in _problems(analysis.roles) if each in built.program.graph.upper_to_lower]
            has_trained = all(built.program.problems[each].num_steps >= MIN_STEPS for each in shaping)
            if has_trained and "weight" in result and _as_tensor(result["weight"]).dim() > 0:
                _warn_of_equal(name, _as_array(result["weight"]).ravel().astype("float64"))
            log(_kept(name, result, artifacts))
        except KeyboardInterrupt:
            raise
        # Code of the user's may raise SystemExit too.
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def _kept(name: str, result: dict[str, Any], artifacts: Path) -> dict[str, float]:
    """Write the texts and arrays of a result, and return its numbers."""
    for key in [key for key, value in result.items() if isinstance(value, str)]:
        write_text(artifacts / f"{name}_{key}.txt", f"{result.pop(key)}\n")
    arrays = {key: value for key, value in result.items() if _as_tensor(value).dim() > 0}
    if arrays:
        with replacing(artifacts / f"{name}.npz") as temporary, temporary.open("wb") as file:
            numpy.savez(file, **{key: _as_array(value) for key, value in arrays.items()})
    return {f"{name}/{key}": float(value) for key, value in result.items() if key not in arrays}


def rehearse_analyses(built: Any, device: torch.device | str = "cpu") -> None:
    """Call each analysis before the first tick, on a few samples of its split; nothing of ours is written.

    One that fails there is called on all samples: a few may lack what it counts on, such as samples of two classes.
    """
    for name, analysis in built.analyses.items():
        dataset = find_split(built.data, analysis.split)
        try:
            _result(name, analysis, built.program, Batches(dataset, analysis.batch_size, device, NUM_REHEARSED))
        except Exception:
            _result(name, analysis, built.program, Batches(dataset, analysis.batch_size, device))


def _result(
    name: str, analysis: Any, program: Program, batches: Batches, advice: str = "Correct it."
) -> dict[str, Any]:
    """Return what an analysis finds, by the names of its values."""
    roles = _bind(name, analysis.roles, program)
    with noted(partial(Call, f"analyses.{name}", analysis.function, {}, _EXPECTED, advice)), torch.no_grad():
        result = analysis.function(batches, **roles)
        if not isinstance(result, Mapping):
            raise WrongResultError(kind_of(result), _EXPECTED, "Return a dict.")
        for key, value in result.items():
            _check(key, value)
        return dict(result)


def _check(key: Any, value: Any) -> None:
    if not is_plain_name(key):
        wanted = f"at most {MAX_NAME} letters, digits, '-', '_' and '.', as it names a file"
        raise WrongResultError(f"the name {str(key)[:MAX_NAME]!r}", wanted, "Rename it.")
    try:
        is_numeric = isinstance(value, str) or _as_array(value).dtype.kind in "biuf"
    except (TypeError, ValueError, RuntimeError):
        is_numeric = False
    if not is_numeric:
        kind = kind_of(value)
        if isinstance(value, Tensor):
            oddities = [
                *([f"of {value.dtype}"] if value.is_complex() else []),
                *(["that is sparse"] if value.layout != torch.strided else []),
                *([f"on the device '{value.device.type}'"] if value.is_meta else []),
            ]
            kind = " ".join([kind, *oddities])
        raise WrongResultError(f"{kind} as '{key}'", _EXPECTED, "Convert it, or save it from your function.")


def _warn_of_equal(name: str, weight: Any) -> None:
    """Warn where all weights are about the same: that the learning rate is another one looks like a gain."""
    if are_equal(weight):
        warnings.warn(
            f"analyses.{name}: all {len(weight)} weights are between {weight.min():.4g} and {weight.max():.4g}, within "
            "1% of each other, so all samples count the same; expected weights that differ. Nothing was gained by "
            "weighting: compare with a run whose weights are fixed at 1. Raise warmup_steps of the weighted problem, "
            "or change the learning rate of the problem that gives the weights.",
            stacklevel=2,
        )


def _problems(roles: Mapping[str, Any]) -> list[str]:
    return [value if isinstance(value, str) else value["problem"] for value in roles.values()]


def _bind(name: str, roles: Mapping[str, Any], program: Program) -> dict[str, BoundModule]:
    bound = {}
    for role, problem in zip(roles, _problems(roles), strict=True):
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
    tensor = _as_tensor(value).detach().cpu()
    # numpy has no such numbers.
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
