"""Every recipe with seeds 0 and 1 as one stack computes what it computes alone, in float64, or says why it is apart."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mlotool import Program, Schedule
from mlotool.config import build
from mlotool.core.unchanged import ROUNDING
from mlotool.runner.together import structure_of
from tests.fusion.members import compared, difference, state_difference
from tests.small_recipes import RECIPES, small

pytestmark = [
    # At its start a network may have negative curvature, which a solver says once.
    pytest.mark.filterwarnings("ignore:The ConjugateGradient solve at problem 'learner'"),
    # Another version of Python has other text.
    pytest.mark.filterwarnings("ignore:data.sha256"),
    # As in tests/test_recipes.py.
    pytest.mark.filterwarnings("ignore:problems.classifier.hypergradient. found products by finite differences"),
]

QUICK = ("plain", "mwn")
SMALLER: dict[str, list[str]] = {
    "maml": [f"problems.{name}.module.hidden=[8]" for name in ("learner", "meta")],
    "oneshot_peaks": ["problems.classifier.module.num_layers=16", "problems.classifier.parallel.levels=2"],
    "layerparallel_penalty": ["problems.classifier.parallel.beta=10"],
}
"""By recipe: what makes it smaller still."""

LAYER_PARALLEL = {"classifier": "trains its layers in parallel"}
REMAT, DRAWS = "would keep what remat of", "the losses draw random numbers"
APART: dict[str, dict[str, str]] = {
    "lm_learning_rate_paper": {"model": REMAT, "rate": REMAT},
    "lm_loss_weighting_paper": {"model": REMAT, "weigher": REMAT},
    "lm_maml_paper": {"learner": REMAT, "meta": REMAT},
    "explore_darts": dict.fromkeys(("classifier", "architecture"), "view size is not compatible"),
    **{f"explore_{name}": dict.fromkeys(("classifier", "architecture"), DRAWS) for name in ("enas", "proxyless")},
    "explore_spos": {"classifier": DRAWS},
    **{
        name: LAYER_PARALLEL
        for name in RECIPES
        if name.startswith(("layerparallel", "multigrid", "oneshot")) or name == "mwn_layerparallel"
    },
}
"""By recipe, by round that is not one program, why."""

TICKS = 12


@cache
def config(recipe: str, seed: int, images: Path, *overrides: str) -> Any:
    return small(recipe, images, [f"seed={seed}", *overrides])


def made(recipe: str, seed: int, images: Path, *overrides: str, dtype: torch.dtype = torch.float64) -> Program:
    program = build(config(recipe, seed, images, *overrides)).program
    for problem in program.problems.values():
        problem.module.to(dtype)
        if problem.stream is not None:
            problem.stream.to(dtype=dtype)
    return program


def after_one_rounding(recipe: str, images: Path) -> float:
    """Return how far a run alone is from one whose parameters were moved by one rounding after two ticks."""
    first, second = (Schedule(made(recipe, 0, images)) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    apart = 0.0
    for tick in range(TICKS):
        if tick == 2:
            for parameter in (each for problem in second.program.problems.values() for each in problem.own):
                signs = torch.randint(2, parameter.shape, generator=generator).to(parameter) * 2 - 1
                parameter.data.mul_(1 + signs * torch.finfo(torch.float64).eps)
        expected, found = first.tick(), second.tick()
        apart = max([apart, *[difference(each.loss, found[name].loss) for name, each in expected.items()]])
    return max(apart, state_difference(first.program, second.program))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "recipe", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_a_stack_of_two_seeds(recipe: str, image_folder: Path) -> None:
    words = SMALLER.get(recipe, [])
    assert len({structure_of(config(recipe, seed, image_folder, *words)) for seed in range(2)}) == 1
    found = compared(lambda seed: made(recipe, seed, image_folder, *words), 2, TICKS)
    assert found.reason == ""
    assert not found.failures
    assert min(found.steps.values()) >= 2
    apart = {name: each.reason for name, each in found.verdicts.items() if not each.is_fused}
    expected = APART.get(recipe, {})
    assert apart.keys() == expected.keys()
    assert all(expected[name] in reason for name, reason in apart.items())
    if found.error >= 1e-9:
        # Finite differences divide what is rounding by a small step; and so the run alone is that far from itself.
        assert found.error < ROUNDING * after_one_rounding(recipe, image_folder) < 1e-6


WIDE, REVERSE = ["hypergradient.radius=0.01"], ["hypergradient.product=reverse"]
EXACT: list[tuple[str, list[str], torch.dtype, float]] = [
    *((name, WIDE, torch.float64, 1e-11) for name in ("mwn", "data_cleaning")),
    *((name, REVERSE, torch.float64, 1e-13) for name in ("mwn", "data_cleaning")),
    *((name, [], torch.float32, 1e-5) for name in ("plain", "maml", "learned_lr")),
    ("mwn", REVERSE, torch.float32, 1e-5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "words", "dtype", "tolerance"), EXACT)
def test_without_small_differences_rounding_stays_rounding(
    recipe: str, words: list[str], dtype: torch.dtype, tolerance: float, image_folder: Path
) -> None:
    found = compared(lambda seed: made(recipe, seed, image_folder, *words, dtype=dtype), ticks=TICKS)
    assert all(each.is_fused for each in found.verdicts.values())
    assert found.error < tolerance and not found.failures
