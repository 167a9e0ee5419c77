"""Checkpoints in which one value has been changed, put to everything that reads one.

`python -m tests.runner.tampered FOLDER FIRST COUNT` makes the runs of RECIPES in the folder where they are missing, and
prints a line a case. What a case is follows from its number.
"""

import contextlib
import copy
import io
import math
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mlotool
from mlotool.core.errors import MlotoolError
from mlotool.core.user_code import explained
from mlotool.runner import evaluate

TICKS = 12
_SHORT = (
    *("runner.accelerator=cpu", "runner.report=false", "runner.progress_bar=false", "logger.wandb=false"),
    "runner.num_threads=1",
)
_EVALUATED = "evaluate.splits={val: 6}"
_SMALL = "problems.classifier.module.hidden=[8]"
_ADAM = "optimizer@problems.classifier.optimizer=adam"
_ADAPTED = ("~analyses.val", "~analyses.test", "objective=meta/loss", "objective_mode=min")
_MWN = (
    "problems.classifier.warmup_steps=2",
    "problems.reweight.module.hidden=4",
    "~analyses.weights",
    _EVALUATED,
    _SMALL,
)
RECIPES: dict[str, tuple[str, ...]] = {
    "sgd": ("plain", _EVALUATED, _SMALL),
    "adam_and_scheduler": (
        *(
            "plain",
            _EVALUATED,
            _SMALL,
            "optimizer@problems.classifier.optimizer=adam",
            "runner.early_stopping_patience=9",
        ),
        "problems.classifier.scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 5}",
    ),
    "plateau": (
        *("plain", _EVALUATED, _SMALL, "problems.classifier.scheduler_interval=evaluation"),
        "problems.classifier.scheduler={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, mode: max}",
    ),
    "unrolled": ("learned_lr", _EVALUATED, _SMALL),
    "tasks": (
        "maml",
        *(f"problems.{name}.module.hidden=[4]" for name in ("meta", "learner")),
        "~analyses.val",
        "~analyses.test",
        "objective=meta/loss",
        "objective_mode=min",
    ),
    "several": ("mwn", *_MWN, "problems.classifier.roll_back=true", "problems.classifier.unroll_steps=2"),
    "warm_starts": ("mwn", *_MWN, "hypergradient=cg", "hypergradient.warm_start=true"),
    "penalty": ("mwn", *_MWN, "hypergradient=penalty"),
}
PROBLEMS = {name: "learner" if name == "tasks" else "classifier" for name in RECIPES}
VERBS = ("resume", "evaluate", "load", "inherit")
Change = Callable[[random.Random, Any], Any]


def _of_a_tensor(change: Callable[[Tensor], Any]) -> Change:
    return lambda draw, old: change(old) if isinstance(old, Tensor) else change(torch.ones(3))


CHANGES: dict[str, Change] = {
    "one element": _of_a_tensor(lambda old: torch.full((1,), 0.5)),
    "no element": _of_a_tensor(lambda old: old.reshape(-1)[:0].clone()),
    "flat": _of_a_tensor(lambda old: old.reshape(-1).clone()),
    "an axis more": _of_a_tensor(lambda old: old[None].clone()),
    "one row more": _of_a_tensor(lambda old: torch.cat([torch.atleast_1d(old)] * 2)),
    "expanded": _of_a_tensor(lambda old: torch.ones((), dtype=old.dtype).expand(old.shape)),
    "turned": _of_a_tensor(lambda old: old.flip(0).t().contiguous().t() if old.dim() == 2 else old),
    "other precision": _of_a_tensor(lambda old: old.to(torch.float16)),
    "whole numbers": _of_a_tensor(lambda old: old.to(torch.int64)),
    "complex": _of_a_tensor(lambda old: old.to(torch.complex64)),
    "not a number": lambda draw, old: torch.full_like(old, math.nan) if _is_float(old) else math.nan,
    "infinite": lambda draw, old: torch.full_like(old, math.inf) if _is_float(old) else math.inf,
    "negative": lambda draw, old: -old - 1 if isinstance(old, int | float | Tensor) and _is_signed(old) else -1,
    "nothing": lambda draw, old: None,
    "huge": lambda draw, old: 10 ** draw.choice([9, 18, 100]),
    "a text": lambda draw, old: "x",
    "true": lambda draw, old: True,
    "a list": lambda draw, old: [old],
    "an empty list": lambda draw, old: [],
    "a dict": lambda draw, old: {"x": old},
    "a number": lambda draw, old: draw.choice([0, 1, -3, 0.5]),
}
KEYS = ("removed", "renamed", "twice")
"""Changes of the key, not of the value."""


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_signed(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.dtype not in (torch.bool, torch.uint8)


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all leaves, empty containers too."""
    items = list(node.items() if isinstance(node, dict) else enumerate(node)) if isinstance(node, dict | list) else []
    for key, each in items:
        yield from _places(each, (*path, key))
    if not items:
        yield path


def tampered(checkpoint: dict[str, Any], number: int) -> tuple[dict[str, Any], str]:
    """Return a checkpoint with one change, and what it is, in words."""
    draw = random.Random(number)
    found = copy.deepcopy(checkpoint)
    # What nobody reads is Lightning's; of what is read each kind is as likely, however many there are of it.
    part = draw.choice([["mlotool"], ["mlotool"], ["mlotool"], ["callbacks"], list(found)])
    kinds: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for each in _places({key: found[key] for key in part}):
        kinds.setdefault(tuple("*" if isinstance(key, int) else key for key in each), []).append(each)
    path = draw.choice(kinds[draw.choice(list(kinds))])
    parent: Any = found
    for key in path[:-1]:
        parent = parent[key]
    change = draw.choice([*CHANGES, *KEYS])
    if change not in KEYS:
        parent[path[-1]] = CHANGES[change](draw, parent[path[-1]])
    elif change == "twice" and isinstance(parent, list):
        parent.append(parent[path[-1]])
    else:
        value = parent.pop(path[-1])
        if change != "removed" and isinstance(parent, dict):
            parent[f"{path[-1]}_"] = value
    return found, f"{'.'.join(map(str, path))}: {change}"


def make_runs(folder: Path) -> None:
    """Make a finished run of each recipe where it is missing."""
    for name, (recipe, *words) in RECIPES.items():
        if not (folder / name).exists():
            config = mlotool.compose(recipe, [*words, *_SHORT, f"runner.max_ticks={TICKS}"])
            mlotool.run(config, output_dir=folder / name)


def outcome(folder: Path, number: int) -> tuple[str, str]:
    """Return what a case does, in words, and how it ends: `works`, `refused: ...`, or `NOT FORESEEN: ...`."""
    name, verb = list(RECIPES)[number % len(RECIPES)], VERBS[number // len(RECIPES) % len(VERBS)]
    recipe, *words = RECIPES[name]
    words = [*words, *_SHORT, f"runner.max_ticks={TICKS + 3}"]
    run = folder / "changed"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / name, run)
    path = run / "checkpoints" / "last.ckpt"
    changed, what = tampered(torch.load(path, weights_only=True), number)
    torch.save(changed, path)
    said = f"{number} {name} {verb} {what}"
    print(said, end=" -> ", flush=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if verb == "resume":
                (run / "summary.json").unlink()
                mlotool.run(mlotool.compose(recipe, words), resume=path)
            elif verb == "evaluate" and name != "tasks":
                evaluate(run, "val", "last")
            elif verb in ("evaluate", "load"):
                mlotool.load(run, PROBLEMS[name], "last")
            else:
                words = [*words, f"inherit={run}", "runner.max_ticks=1", "runner.checkpoint=false"]
                shutil.rmtree(folder / "heir", ignore_errors=True)
                mlotool.run(mlotool.compose(recipe, words), output_dir=folder / "heir")
    except MlotoolError as error:
        return said, f"refused: {error}"
    except Exception as error:
        # This file is none of the user's.
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
        return said, f"{'NOT FORESEEN' if explained(error) is None else 'told'}: {type(error).__name__}: {error}"
    return said, "works"


def main(folder: Path, first: int, count: int) -> None:
    """Print a line a case."""
    with contextlib.redirect_stderr(io.StringIO()):
        make_runs(folder)
        for number in range(first, first + count):
            print(" ".join(outcome(folder, number)[1].split())[:600], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
