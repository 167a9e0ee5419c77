"""Runs of a recipe whose optimizers, schedules and losses differ in numbers or kind are one program, in float64."""

from collections.abc import Sequence

import pytest
import torch

import mlotool
from mlotool import Program
from mlotool.config import build
from mlotool.config.sweep_plan import structure_of
from tests.fusion.members import compared

pytestmark = pytest.mark.usefixtures("no_clock")

OPTIMIZER = "problems.classifier.optimizer"
ADAM = f"{OPTIMIZER}={{_target_: torch.optim.Adam, lr: 0.01"
ADAMW = f"{OPTIMIZER}={{_target_: torch.optim.AdamW, lr: 0.01"
SGD = f"{OPTIMIZER}={{_target_: torch.optim.SGD, lr: 0.05, momentum: 0.9"
SCHEDULER = "problems.classifier.scheduler_interval=step", "problems.classifier.scheduler"
SCHEDULES = "torch.optim.lr_scheduler"


def each_of(key: str, *values: object) -> list[list[str]]:
    return [[f"{key}={value}"] for value in values]


def ends(begin: str, *rest: str) -> list[list[str]]:
    return [[f"{begin}{each}}}"] for each in rest]


def scheduled(*nodes: str) -> list[list[str]]:
    interval, key = SCHEDULER
    return [[interval, f"{key}={node}"] for node in nodes]


BOTH: dict[str, Sequence[list[str]]] = {
    "rate": each_of(f"{OPTIMIZER}.lr", 0.1, 0.01, 0.003),
    "decay": ends(SGD, "", ", weight_decay: 0.1", ", weight_decay: 0.5"),
    "momentum": ends(f"{OPTIMIZER}={{_target_: torch.optim.SGD, lr: 0.05", "", ", momentum: 0.5", ", momentum: 0.9"),
    "nesterov": ends(SGD, ", nesterov: true", ", nesterov: false", ", dampening: 0.3"),
    "betas": ends(ADAM, ", betas: [0.9, 0.99]", ", betas: [0.8, 0.95]", ", betas: [0.0, 0.9]"),
    "eps": ends(ADAM, ", eps: 1e-8", ", eps: 1e-4", ", eps: 0.1"),
    "decay of Adam": ends(ADAM, "", ", weight_decay: 0.1", ", weight_decay: 0.1, amsgrad: true"),
    "AdamW": ends(
        ADAMW, ", weight_decay: 0.0", ", weight_decay: 0.1, betas: [0.8, 0.9]", ", weight_decay: 0.5, eps: 1e-3"
    ),
    "kinds of optimizers": [*ends(SGD, ""), *ends(ADAM, ""), *ends(ADAMW, "")],
    "kinds of schedules": scheduled(
        "null",
        f"{{_target_: {SCHEDULES}.CosineAnnealingLR, T_max: 7}}",
        f"{{_target_: {SCHEDULES}.OneCycleLR, max_lr: 0.1, total_steps: 30}}",
    ),
    "numbers of a schedule": scheduled(
        *(
            f"{{_target_: {SCHEDULES}.StepLR, step_size: {size}, gamma: {gamma}}}"
            for size, gamma in ((3, 0.5), (4, 0.1), (5, 2))
        )
    ),
    "clipping": each_of("problems.classifier.gradient_clip_norm", "null", 0.1, 1.0),
}
SETTINGS = {
    **{("plain", name): words for name, words in BOTH.items()},
    **{("mwn", name): words for name, words in BOTH.items()},
    ("plain", "smoothing"): each_of("+problems.classifier.loss.label_smoothing", 0.0, 0.1, 0.4),
    ("mwn", "smoothing"): each_of("+problems.reweight.loss.label_smoothing", 0.0, 0.1, 0.4),
    ("mwn", "rate above"): each_of("problems.reweight.optimizer.lr", 0.1, 0.01, 0.001),
    ("mwn", "clipping above"): each_of("problems.reweight.gradient_clip_norm", "null", 1e-4, 1.0),
}


def made(recipe: str, words: Sequence[str]) -> Program:
    program = build(mlotool.compose(recipe, words)).program
    for problem in program.problems.values():
        problem.module.double()
        assert problem.stream is not None
        problem.stream.to(dtype=torch.float64)
    return program


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "setting"), SETTINGS)
def test_runs_that_differ_are_one_program(recipe: str, setting: str) -> None:
    small = ["debug=fast", "problems.classifier.module.hidden=[16]", "problems.classifier.stream.batch_size=20"]
    # What is compared is no finite difference, which magnifies rounding.
    small += ["hypergradient.product=reverse"] if recipe == "mwn" else []
    words = [[*small, *each] for each in SETTINGS[recipe, setting]]
    assert len({structure_of(mlotool.compose(recipe, each)) for each in words}) == 1
    found = compared(lambda number: made(recipe, words[number]), ticks=14)
    assert found.verdicts and all(each.is_fused for each in found.verdicts.values())
    assert found.error < 1e-9 and not found.failures
