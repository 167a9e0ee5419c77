"""Recipes with seeds 0, 1, 2 as one stack compute what they compute alone, in float64."""

import pytest
import torch

import mlotool
from mlotool import Program
from mlotool.config import build
from mlotool.config.structure import structure_of
from tests.fusion.members import compared

pytestmark = [
    pytest.mark.usefixtures("no_clock"),
    # At its start a network may have negative curvature, which a solver says once.
    pytest.mark.filterwarnings("ignore:The ConjugateGradient solve at problem 'learner'"),
    # Another version of Python has other text.
    pytest.mark.filterwarnings("ignore:data.sha256"),
]

KEEPS = "keeps something from one use to the next, or decides by values"
QUICK = {
    "plain": {},
    "mwn": {},
    "data_cleaning": {},
    "label_correction": {},
    "maml": {},
    "learned_lr": {},
}
"""By recipe, by problem that is not stacked why."""

SLOW = {
    "data_poisoning": {},
    "domain_adaptation": {},
    "domain_adaptation_direct": {},
    "implicit_maml": {},
    "lm_data_mixture": {},
    "lm_learning_rate": {},
    "lm_loss_weighting": {},
    "lm_maml": {},
    "lm_plain": {},
    "lm_plain_start": {},
    "logistic_hpo": {},
    "mwn_text": {},
}


def made(recipe: str, seed: int) -> Program:
    program = build(mlotool.compose(recipe, ["debug=fast", f"seed={seed}"])).program
    for problem in program.problems.values():
        problem.module.double()
        if problem.stream is not None:
            problem.stream.to(dtype=torch.float64)
    return program


@pytest.mark.parametrize("recipe", [*QUICK, *[pytest.param(name, marks=pytest.mark.slow) for name in SLOW]])
def test_a_stack_of_three_seeds(recipe: str) -> None:
    structures = {structure_of(mlotool.compose(recipe, ["debug=fast", f"seed={seed}"])) for seed in range(3)}
    assert len(structures) == 1
    found = compared(lambda seed: made(recipe, seed), ticks=20 if recipe in SLOW else 10)
    assert not found.reason
    assert not found.failures
    # Finite differences divide what is rounding by a small step.
    assert found.error < 1e-8
    apart = {name: each.reason for name, each in found.verdicts.items() if not each.is_fused}
    expected = (QUICK | SLOW)[recipe]
    assert apart.keys() == expected.keys()
    assert all(expected[name] in reason for name, reason in apart.items())
