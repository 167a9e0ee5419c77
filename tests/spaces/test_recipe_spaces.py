"""The spaces of the recipes: whatever is drawn from them builds, and builds again to the bit in a new process."""

import hashlib
import json
import random
from contextlib import suppress
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch._subclasses.fake_tensor import FakeTensorMode

import mlotool
from mlotool.config.building import build_module, build_modules
from mlotool.config.checks import checked
from mlotool.core.errors import InfeasibleModelError
from mlotool.sweep.study import suggest
from tests import forked
from tests.small_recipes import RECIPES

ONE_SHOT = ("explore_darts", "explore_proxyless", "explore_enas", "explore_spos", "explore_spos_search")
"""They have the space of explore_residual."""
EXPLORING = [name for name in RECIPES if name.startswith("explore_") and name not in ONE_SHOT]
MOST_INFEASIBLE = 0.05
QUICK = ("explore_path_level", "explore_weight_agnostic", "explore_mwn")


def drawn(recipe: str, number: int) -> dict[str, Any] | None:
    """Return decisions of a recipe, all candidates alike; None where they make no model."""
    generator = random.Random(f"{recipe} {number}")
    try:
        return build_modules(_values(recipe), lambda name, candidates: generator.choice(candidates)).values
    except InfeasibleModelError as error:
        assert "'" in str(error) and "expected" in str(error), error
        return None


@cache
def _config(recipe: str) -> DictConfig:
    return mlotool.compose(recipe, ["logger=csv"])


@cache
def _values(recipe: str) -> Any:
    return checked(_config(recipe), targets=True)[0]


def digest(recipe: str, decisions: dict[str, Any]) -> str:
    """Return a number for all that the modules of a run begin with."""
    config = deepcopy(_config(recipe))
    config.decisions = decisions
    found = hashlib.sha256()
    for name in config.problems:
        module = build_module(config, name)
        for key, tensor in module.state_dict().items():
            found.update(key.encode() + tensor.numpy().tobytes())
        found.update(str(getattr(module, "nodes", "")).encode())
    return found.hexdigest()


def digests(recipe: str, draws: list[dict[str, Any]]) -> list[str]:
    return [digest(recipe, each) for each in draws]


def print_digests(*given: Any) -> None:
    print(json.dumps(digests(*given)))


@pytest.mark.parametrize(
    ("recipe", "num_draws"),
    [*((name, 2) for name in QUICK[1:]), *(pytest.param(name, 200, marks=pytest.mark.slow) for name in EXPLORING)],
)
def test_draws_build_again_to_the_bit_in_another_process(recipe: str, num_draws: int, tmp_path: Path) -> None:
    feasible = [each for number in range(num_draws) if (each := drawn(recipe, number)) is not None]
    assert len(feasible) >= (1 - MOST_INFEASIBLE) * num_draws
    assert len({str(each) for each in feasible}) > num_draws // 4
    elsewhere = forked.run(print_digests, recipe, feasible[:50], folder=tmp_path).stdout
    assert json.loads(elsewhere.splitlines()[-1]) == digests(recipe, feasible[:50])


@pytest.mark.parametrize("recipe", QUICK)
def test_the_first_candidates_are_what_a_run_trains(recipe: str) -> None:
    first = build_modules(_values(recipe), lambda name, candidates: candidates[0]).values
    assert first
    assert digest(recipe, {}) == digest(recipe, first)


@pytest.mark.parametrize("recipe", QUICK)
def test_models_without_values_make_the_same_decisions(recipe: str) -> None:
    generator = random.Random(recipe)
    decided: dict[str, Any] = {}

    def decide(name: str, candidates: Any) -> Any:
        return decided.setdefault(name, generator.choice(candidates))

    with FakeTensorMode():
        build_modules(_values(recipe), decide)
    before = dict(decided)
    assert build_modules(_values(recipe), decide).values == before == decided
    assert torch.empty(0).device.type == "cpu"


@pytest.mark.parametrize("recipe", QUICK)
def test_a_study_asks_for_whatever_is_drawn(recipe: str) -> None:
    # Optuna takes no other candidates for a name than those that it had in earlier trials.
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(4):
        trial, decided = study.ask(), dict[str, Any]()
        with FakeTensorMode(), suppress(InfeasibleModelError):
            build_modules(_values(recipe), partial(suggest, trial, decided))
        study.tell(trial, 0.0)
        assert len(trial.params) == len(decided) > 1
