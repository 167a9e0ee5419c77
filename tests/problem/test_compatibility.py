"""The table of features that exclude each other: each row refuses, and what is in no row goes together."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from docs.generated.compatibility import page
from mlotool import SABA, Graph, Penalty, Problem, Program, Schedule, Stream, Unrolled
from mlotool.core.errors import ConfigError
from mlotool.hypergradient import ConjugateGradient, EvolutionStrategies, Identity, Implicit, KeepEvery, Nystrom
from mlotool.layerparallel import Auxiliary
from mlotool.problem.compatibility import FEATURES, ROWS, Case, broken, check, message
from mlotool.problem.settings import ProblemSettings
from mlotool.problem.streams.stream import SameBatch
from mlotool.spaces import Operator, SharedSpace, UniformPaths

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BATCHES = [torch.full((2, 3), 0.1 * (number + 1)) for number in range(6)]


class Divided(Auxiliary):
    @property
    def is_divided(self) -> bool:
        return True


class Ready(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)


def drawing(**settings: Any) -> SharedSpace:
    activation = Operator("activation", {"type": "ReLU"}, {"relu": None, "tanh": nn.Tanh})
    base = partial(nn.Sequential, nn.Linear(2, 2), nn.ReLU())
    return SharedSpace(base, [activation], [2], **{"paths": UniformPaths(), **settings})


LBFGS = torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])
SETTINGS: dict[str, Any] = {
    "tasks": 2,
    "compile": True,
    "shard": True,
    "remat": ("0",),
    "optimizer_roles": {"lr": "rate"},
    "reset_to": "initial",
    "roll_back": True,
    "warmup_steps": 1,
    "gradient_clip_norm": 1.0,
}
# By feature, what of a case has it.
CASES: dict[str, dict[str, Any]] = {
    **{name: {"settings": {name: value}} for name, value in SETTINGS.items()},
    "shard: true": {"settings": {"shard": True}},
    "precision: fp16": {"settings": {"precision": "fp16"}},
    "training_step": {"takes_steps": True},
    "complex parameters": {"module": nn.Linear(1, 1, dtype=torch.complex64)},
    "sparse gradients": {"module": nn.Embedding(2, 2, sparse=True)},
    "module that draws paths": {"module": drawing()},
    "module.statistics: path": {"module": drawing(paths=None, statistics="path")},
    "parallel": {"parallel": Auxiliary(2)},
    "parallel: Auxiliary": {"parallel": Auxiliary(2)},
    "parallel.processes": {"parallel": Divided(2, processes=True)},
    "line search": {"optimizer": LBFGS},
    "optimizer other than Adam, AdamW, SGD": {"optimizer": LBFGS},
    "scheduler": {"scheduler": object()},
    "same_batch_as": {"stream": SameBatch(Stream(BATCHES, 2))},
    "data set of whole batches": {"stream": Stream(DataLoader(Ready(), batch_size=None))},
    "gradient through a lower solution": {"read": "low"},
    "hypergradient other than first_order": {"algorithm": Implicit(Identity()), "solution": "low", "reader": "top"},
    "hypergradient.product: finite_difference": {"algorithm": Implicit(Identity(), "finite_difference")},
    "hypergradient.product: forward": {"algorithm": Implicit(Identity(), "forward")},
    "solver without a derivative": {"algorithm": Implicit(Nystrom(rank=2))},
    "hypergradient through the steps": {"algorithm": Unrolled()},
    "trajectory that stores only some steps": {"algorithm": Unrolled(trajectory=KeepEvery())},
    "hypergradient.remat: false": {"algorithm": Unrolled(remat=False)},
    "hypergradient.persistent: true": {"algorithm": EvolutionStrategies(persistent=True)},
    "evolution": {"algorithm": EvolutionStrategies()},
    "penalty method": {"algorithm": Penalty(multiplier=10.0, num_steps=2, step_size=0.1)},
    "saba": {"algorithm": SABA(0.1)},
    "hypergradient that makes the steps": {"algorithm": SABA(0.1)},
    "hypergradient that a trace cannot repeat": {"algorithm": SABA(0.1)},
    "middle problem": {"is_nested": True},
    "differentiated hypergradient": {"is_differentiated": True},
    "hypergradient.rule: barrier": {"algorithm": Penalty(rule="barrier", barrier=0.5, num_steps=2, step_size=0.1)},
    "solution that depends on tasks": {"shaped_by_tasks": "t"},
    "several ranks": {"num_ranks": 2},
    "tasks on several ranks": {"settings": {"tasks": 2}, "num_ranks": 2},
    "shared space on several ranks": {"runs_in_part": True},
    "runner.trace": {"is_traced": True},
    "sweep.fuse": {"is_fused": True},
}


def case_of(*features: str) -> Case:
    given: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for feature in features:
        parts = dict(CASES[feature])
        settings |= parts.pop("settings", {})
        given |= parts
    return Case("p", ProblemSettings(**settings), **given)


def test_each_row_holds_for_its_two_features_and_not_for_one() -> None:
    for row in ROWS:
        case = case_of(row.first, row.second)
        assert row in broken(case)
        assert not any(row in broken(case_of(one)) for one in (row.first, row.second))
        if row.key:
            with pytest.raises(ConfigError, match=r"^problems\.p\.\S+: found .* with .*; expected .*, since .*\.$"):
                check(case)
            assert not re.search(r"\{(name|solution|reader|read|tasks|algorithm|optimizer)\}", message(row, case))


def test_every_feature_is_in_a_row() -> None:
    assert {name for row in ROWS for name in (row.first, row.second)} == set(FEATURES) == set(CASES)


def test_the_page_has_the_tables() -> None:
    text = PAGE.read_text()
    for table in page().split("\n\n"):
        assert table.strip() in text, "Write the tables anew: python -m docs.generated.compatibility"


STEPS = partial(torch.optim.SGD, lr=0.1)
ALGORITHMS: dict[str, Any] = {
    "reverse": Implicit(ConjugateGradient(3)),
    "differences": Implicit(Identity(), "finite_difference"),
    "forward": Implicit(ConjugateGradient(3), "forward"),
    "unrolled": Unrolled(),
    "penalty": Penalty(multiplier=10.0, num_steps=2, step_size=0.1),
    "saba": SABA(0.1),
    "evolution": EvolutionStrategies(num_pairs=2),
    "persistent": EvolutionStrategies(num_pairs=2, persistent=True),
}
TOGETHER: list[dict[str, Any]] = [
    {"remat": ["0"], "gradient_clip_norm": 0.1, "accumulate_batches": 2, "warmup_steps": 1, "unroll_steps": 2},
    {"tasks": 2, "roll_back": True, "unroll_steps": 2, "gradient_clip_norm": 0.1},
    {"optimizer": partial(torch.optim.LBFGS, max_iter=2), "remat": ["0"], "warmup_steps": 1},
    {"reset_to": "initial", "tasks": 2, "remat": ["0"]},
]


def lower_loss(batch: Tensor, *, w: Any, u: Any) -> Tensor:
    return ((w(batch) - 1.0) ** 2).mean() + u(batch).square().mean() * w(batch).square().mean()


def upper_loss(batch: Tensor, *, w: Any, u: Any) -> Tensor:
    return (w(batch) ** 2).mean() + u(batch).square().mean()


def bilevel(**given: Any) -> Program:
    torch.manual_seed(0)
    module, roles = nn.Sequential(nn.Linear(3, 1)), {"w": "w", "u": "u"}
    given = {"optimizer": STEPS, "stream": Stream(BATCHES, 2, shuffle=False), **given}
    low = Problem("w", module, lower_loss, roles=roles, **given)
    top = Problem("u", nn.Linear(3, 1), upper_loss, roles=roles, stream=Stream(BATCHES, 2), optimizer=STEPS)
    return Program([low, top], Graph({"u": ["w"]}, {"w": ["u"]}))


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore")  # of solves that end early
@pytest.mark.parametrize("settings", TOGETHER, ids=" ".join)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_in_no_row_goes_together(name: str, settings: dict[str, Any]) -> None:
    case = Case("w", ProblemSettings.of("w", {key: x for key, x in settings.items() if key != "optimizer"}))
    optimizer = settings.get("optimizer", STEPS)([nn.Parameter(torch.zeros(1))])
    case = replace(case, optimizer=optimizer, algorithm=ALGORITHMS[name])
    if any(row.key for row in broken(case)):
        with pytest.raises(ConfigError, match=r"^problems\.w\..*; expected "):
            bilevel(hypergradient=ALGORITHMS[name], **settings)
        return
    schedule = Schedule(bilevel(hypergradient=ALGORITHMS[name], **settings))
    for _ in range(3):
        results = schedule.tick()
    assert all(torch.isfinite(result.loss) for result in results.values())
    assert all(torch.isfinite(x).all() for each in schedule.program.problems.values() for x in each.theta.values())


def test_the_first_row_that_holds_is_told() -> None:
    case = case_of("tasks", "compile")
    with pytest.raises(ConfigError, match=r"problems\.p\.compile: found compile with tasks; expected false, since"):
        check(case)
    check(replace(case, settings=ProblemSettings(tasks=2)))
