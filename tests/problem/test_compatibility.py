"""The table of what cannot go together: each row refuses, and what is in no row goes together."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import (
    SABA,
    ConjugateGradient,
    EvolutionStrategies,
    Graph,
    Identity,
    Implicit,
    Nystrom,
    Penalty,
    Problem,
    Program,
    Schedule,
    Stream,
    Unrolled,
)
from mlotool.core.errors import ConfigError
from mlotool.hypergradient import KeepEvery
from mlotool.layerparallel import Auxiliary
from mlotool.problem.compatibility import FEATURES, ROWS, Case, Row, broken, check, message, page
from mlotool.problem.settings import ProblemSettings
from mlotool.problem.stream import SameBatch
from mlotool.spaces import Operator, SharedSpace, UniformPaths

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BATCHES = [torch.full((2, 3), 0.1 * (number + 1)) for number in range(6)]


class Divided(Auxiliary):
    @property
    def is_divided(self) -> bool:
        return True


def lbfgs() -> torch.optim.Optimizer:
    return torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])


def drawing(**settings: Any) -> SharedSpace:
    activation = Operator("activation", {"type": "ReLU"}, {"relu": None, "tanh": nn.Tanh})
    base = partial(nn.Sequential, nn.Linear(2, 2), nn.ReLU())
    return SharedSpace(base, [activation], [2], **{"paths": UniformPaths(), **settings})


# By feature, what of a case has it.
CASES: dict[str, dict[str, Any]] = {
    **{
        name: {"settings": setting}
        for name, setting in {
            "tasks": {"tasks": 2},
            "compile": {"compile": True},
            "shard": {"shard": True},
            "shard_all": {"shard": True},
            "blocks": {"remat": ("0",)},
            "fp16": {"precision": "fp16"},
            "optimizer_roles": {"optimizer_roles": {"lr": "rate"}},
            "reset_to": {"reset_to": "initial"},
            "roll_back": {"roll_back": True},
            "warmup": {"warmup_steps": 1},
            "clip": {"gradient_clip_norm": 1.0},
        }.items()
    },
    "complex": {"module": nn.Linear(1, 1, dtype=torch.complex64)},
    "sparse_layers": {"module": nn.Embedding(2, 2, sparse=True)},
    "draws": {"module": drawing()},
    "path_statistics": {"module": drawing(paths=None, statistics="path")},
    "parallel": {"parallel": Auxiliary(2)},
    "auxiliary": {"parallel": Auxiliary(2)},
    "processes": {"parallel": Divided(2, processes=True)},
    "line_search": {"optimizer": lbfgs()},
    "impure": {"optimizer": lbfgs()},
    "scheduler": {"scheduler": object()},
    "same_batch": {"stream": SameBatch(Stream(BATCHES, 2))},
    "reads": {"read": "low"},
    "hypergradient": {"algorithm": Implicit(Identity()), "solution": "low", "reader": "top"},
    "differences": {"algorithm": Implicit(Identity(), "finite_difference")},
    "sparse": {"algorithm": Unrolled(trajectory=KeepEvery())},
    "forward": {"algorithm": Implicit(Identity(), "forward")},
    "approximate": {"algorithm": Implicit(Nystrom(rank=2))},
    "unrolled": {"algorithm": Unrolled()},
    "persistent": {"algorithm": EvolutionStrategies(persistent=True)},
    "penalty": {"algorithm": Penalty(multiplier=10.0, num_steps=2, step_size=0.1)},
    "saba": {"algorithm": SABA(0.1)},
    "directing": {"algorithm": SABA(0.1)},
    "evolution": {"algorithm": EvolutionStrategies()},
    "nested": {"is_nested": True},
    "differentiated": {"is_differentiated": True},
    "ranks": {"num_ranks": 2},
    "parts": {"runs_in_part": True},
    "trace": {"is_traced": True},
    "fuse": {"is_fused": True},
    "remembering": {"algorithm": SABA(0.1)},
    "graphs": {"algorithm": Unrolled(remat=False)},
}


def case_of(*features: str) -> Case:
    given: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for feature in features:
        parts = dict(CASES[feature])
        settings |= parts.pop("settings", {})
        given |= parts
    return Case("p", ProblemSettings(**settings), **given)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.first} with {row.second}")
def test_each_row_holds_for_its_two_features_and_not_for_one(row: Row) -> None:
    case = case_of(row.first, row.second)
    assert row in broken(case)
    for one in (row.first, row.second):
        assert row not in broken(case_of(one))
    if not row.key:
        return
    with pytest.raises(ConfigError):
        check(case)
    text = message(row, case)
    assert text.startswith(f"problems.p.{row.key}: found ")
    assert "; expected " in text and ", since " in text and "{" not in text and text.endswith(".")


def test_every_feature_is_in_a_row() -> None:
    assert {name for row in ROWS for name in (row.first, row.second)} == set(FEATURES) == set(CASES)


def test_the_page_is_that_of_the_table() -> None:
    write = "python -m mlotool.problem.compatibility > docs/compatibility.md"
    assert PAGE.read_text() == page(), f"The table has changed; write the page anew: {write}"


# By feature, what of a problem below has it.
HELD: dict[str, dict[str, Any]] = {
    "tasks": {"tasks": 2},
    "fp16": {"precision": "fp16"},
    "reset_to": {"reset_to": "initial"},
    "roll_back": {"roll_back": True},
    "warmup": {"warmup_steps": 1},
    "clip": {"gradient_clip_norm": 0.1},
    "scheduler": {"scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)},
    "accumulate": {"accumulate_batches": 2},
    "blocks": {"remat": ["0"]},
    "several steps": {"unroll_steps": 2},
    "line_search": {"optimizer": partial(torch.optim.LBFGS, max_iter=2)},
    "reverse": {"hypergradient": Implicit(ConjugateGradient(3))},
    "differences": {"hypergradient": Implicit(Identity(), "finite_difference")},
    "forward": {"hypergradient": Implicit(ConjugateGradient(3), "forward")},
    "unrolled": {"hypergradient": Unrolled()},
    "penalty": {"hypergradient": Penalty(multiplier=10.0, num_steps=2, step_size=0.1)},
    "saba": {"hypergradient": SABA(0.1)},
    "evolution": {"hypergradient": EvolutionStrategies(num_pairs=2)},
    "persistent": {"hypergradient": EvolutionStrategies(num_pairs=2, persistent=True)},
}
# By key of HELD, its features where they have another name.
ROWS_OF = {
    "line_search": {"line_search", "impure"},
    "reverse": {"hypergradient", "twice"},
    "saba": {"saba", "directing", "twice"},
    "evolution": {"evolution", "unrolled"},
    "persistent": {"persistent", "unrolled"},
}
ALGORITHMS = {"reverse", "forward", "differences", "unrolled", "penalty", "saba", "evolution", "persistent"}


def lower_loss(batch: Tensor, *, w: Any, u: Any) -> Tensor:
    return ((w(batch) - 1.0) ** 2).mean() + u(batch).square().mean() * w(batch).square().mean()


def upper_loss(batch: Tensor, *, w: Any, u: Any) -> Tensor:
    return (w(batch) ** 2).mean() + u(batch).square().mean()


def bilevel(**given: Any) -> Program:
    torch.manual_seed(0)
    step = partial(torch.optim.SGD, lr=0.1)
    stream = Stream(BATCHES, 2, shuffle=False)
    below = {"optimizer": step, "hypergradient": Implicit(ConjugateGradient(3)), **given}
    module = nn.Sequential(nn.Linear(3, 1))
    low = Problem("w", module, lower_loss, roles={"w": "w", "u": "u"}, stream=stream, **below)
    top = Problem(
        "u", nn.Linear(3, 1), upper_loss, roles={"w": "w", "u": "u"}, stream=Stream(BATCHES, 2), optimizer=step
    )
    return Program([low, top], Graph({"u": ["w"]}, {"w": ["u"]}))


def pairs() -> list[tuple[str, str]]:
    return [(a, b) for a, b in combinations(HELD, 2) if not {a, b} <= ALGORITHMS]


@pytest.mark.filterwarnings("ignore")  # of solves that end early
@pytest.mark.parametrize("pair", pairs(), ids=" with ".join)
def test_what_is_in_no_row_goes_together(pair: tuple[str, str]) -> None:
    given = deepcopy({**HELD[pair[0]], **HELD[pair[1]]})
    sides = [ROWS_OF.get(each, {each}) for each in pair]
    is_refused = any(
        row.key and {row.first, row.second} & sides[0] and {row.first, row.second} & sides[1] for row in ROWS
    )
    if is_refused:
        with pytest.raises(ConfigError, match=r"^problems\.w\..*; expected "):
            bilevel(**given)
        return
    schedule = Schedule(bilevel(**given))
    for _ in range(4):
        results = schedule.tick()
    assert all(torch.isfinite(each.loss) for each in results.values())
    assert all(torch.isfinite(x).all() for each in schedule.program.problems.values() for x in each.theta.values())


def test_the_first_row_that_holds_is_told() -> None:
    case = case_of("tasks", "compile")
    with pytest.raises(ConfigError, match=r"problems\.p\.compile: found true; expected false, since tasks run through"):
        check(case)
    check(replace(case, settings=ProblemSettings(tasks=2)))
