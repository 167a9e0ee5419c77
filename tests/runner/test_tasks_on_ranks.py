"""Tasks that two real processes divide, which talk by gloo, against one process with all of them."""

import os
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import SABA, ConfigError, EvolutionStrategies, FirstOrder, Implicit, Neumann, Penalty, Unrolled, compose
from mlotool.config.check_values import stream_faults
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import ConjugateGradient, KeepEvery, Nystrom
from mlotool.problem.task_share import gathered_tasks, own_tasks
from mlotool.program import Graph, Problem, Program, SameBatch, Schedule, Stream
from mlotool.runner.checkpoint import read_checkpoint
from mlotool.runner.distributed import merge_shards
from mlotool.runner.run_config import World, joined, run
from tests.over_ranks import over
from tests.program.small import assert_identical
from tests.runner.processes import run_ranks
from tests.runner.test_shards import runs, tensors

TASKS = 4


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def episodes() -> list[dict[str, Tensor]]:
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [{"support": draw(4, 2), "query": draw(4, 2), "slope": draw(2)} for _ in range(3 * TASKS)]


def error(model: Any, batch: Any, part: str) -> Tensor:
    return ((model(batch[part]).squeeze(-1) - (batch[part] * batch["slope"].unsqueeze(-2)).sum(-1)) ** 2).mean()


def near(loss: Tensor, model: Any, start: Any) -> Tensor:
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return loss + sum(((a - b) ** 2).sum() for a, b in pairs)


def learn(batch: Any, *, model: Any, start: Any) -> Tensor:
    return near(error(model, batch, "support"), model, start)


def generalize(batch: Any, *, model: Any, own: Any = None) -> Tensor:
    loss = error(model, batch, "query")
    return loss if own is None else near(loss, own, model)


def between(batch: Any, *, model: Any, own: Any, top: Any) -> Tensor:
    return near(generalize(batch, model=model, own=own), own, top)


SGD = partial(torch.optim.SGD, lr=0.05)


class Rate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.tensor(-3.0, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.logarithm.exp()


def maml(hypergradient: Any, *, learns_rate: bool = False, **settings: Any) -> Program:
    """Two levels: what the tasks stay near to, and begin at; the rate of their steps may be learned as well."""
    stream = Stream(episodes(), TASKS, repeat=2)
    given: dict[str, Any] = {"optimizer": partial(SGD, momentum=0.5), "unroll_steps": 2, "reset_to": "meta"}
    given |= {"stream": stream, "tasks": TASKS, "hypergradient": hypergradient, **settings}
    other: Any = {"stream": SameBatch(given["stream"]), "optimizer": SGD}
    uppers = [Problem("meta", net(0), generalize, roles={"model": "learner", "own": "meta"}, **other)]
    if learns_rate:
        given["optimizer_roles"] = {"lr": "rate"}
        uppers.insert(0, Problem("rate", Rate(), generalize, roles={"model": "learner"}, **other))
    lower = Problem("learner", net(0), learn, roles={"model": "learner", "start": "meta"}, **given)
    names = [problem.name for problem in uppers]
    return Program([lower, *uppers], Graph({name: ["learner"] for name in names}, {"learner": names}))


def three_levels(middle: Any, lowest: Any, tasks: int | None) -> Program:
    """The problem in the middle shapes and reads tasks; it has `tasks` as well, or is one for all of them."""
    stream = Stream(episodes(), TASKS)
    roles = {"model": "low", "start": "mid"}
    low = Problem("low", net(0), learn, roles=roles, stream=stream, optimizer=SGD, tasks=TASKS, hypergradient=lowest)
    given: dict[str, Any] = {"stream": SameBatch(stream), "optimizer": SGD}
    shaped = {"roles": {"model": "low", "own": "mid", "top": "top"}, "tasks": tasks, "hypergradient": middle, **given}
    mid = Problem("mid", net(1), between, **shaped)
    top = Problem("top", net(2), generalize, roles={"model": "mid"}, **given)
    return Program([low, mid, top], Graph({"top": ["mid"], "mid": ["low"]}, {"low": ["mid"], "mid": ["top"]}))


# Of three levels, conjugate gradients would make 0.05 of a difference of 1e-15 within 52 ticks.
NEUMANN = Implicit(Neumann(3, 0.1))
CG = ConjugateGradient(2, damping=0.1)
PROGRAMS: dict[str, Callable[[], Program]] = {
    "unrolled": partial(maml, Unrolled()),
    "graphs": partial(maml, Unrolled(remat=False)),
    "truncated": partial(maml, Unrolled(horizon=1), reset_to=None, gradient_clip_norm=0.3, accumulate_batches=2),
    "trajectory": partial(maml, Unrolled(trajectory=KeepEvery(steps=2)), unroll_steps=3),
    "adam": partial(maml, Unrolled(), optimizer=partial(torch.optim.Adam, lr=0.02), reset_to="initial"),
    "cg": partial(maml, Implicit(CG, warm_start=True), reset_to=None, optimizer=partial(torch.optim.Adam, lr=0.02)),
    "neumann": partial(maml, NEUMANN),
    "nystrom": partial(maml, Implicit(Nystrom(rank=2, rho=1.0), "forward")),
    "difference": partial(maml, Implicit(CG, "finite_difference"), roll_back=True, reset_to=None),
    "first_order": partial(maml, FirstOrder()),
    "penalty": partial(maml, Penalty(multiplier=10.0, num_steps=2, step_size=0.1), reset_to=None),
    "learned rate": partial(maml, Unrolled(), learns_rate=True),
    "evolution": partial(maml, EvolutionStrategies(num_pairs=2)),
    "nested": partial(three_levels, NEUMANN, NEUMANN, None),
    "nested tasks": partial(three_levels, NEUMANN, NEUMANN, TASKS),
    "nested unrolled": partial(three_levels, Unrolled(), Unrolled(), None),
}


SOME = "unrolled", "truncated", "cg", "neumann", "nested"
"""One of each kind; of the others the slow test is."""


def compute(ranks: Ranks, names: Iterable[str], num_ticks: int) -> dict[str, dict[str, Tensor]]:
    """Return, by program, the top gradient at the start, the mean losses, and the whole state after ticks."""
    found = {}
    for name in names:
        made = over(ranks, PROGRAMS[name]())
        top = list(made.problems)[-1]
        gradients = {f"gradient/{key}": value for key, value in made.gradient(top).items()}
        schedule, losses = Schedule(made), []
        for _ in range(num_ticks):
            losses += [result.loss for result in schedule.tick().values()]
        found[name] = {
            **gradients,
            **tensors(whole(ranks, schedule)[0]),
            "losses": ranks.mean([torch.stack(losses)])[0],
        }
    return found


def whole(ranks: Ranks, schedule: Schedule) -> list[dict[str, Any]]:
    """Return the states of the problems with all tasks, and those to which they will go back."""
    program = schedule.program
    states = [program.state_dict(), schedule.state_dict()["snapshots"]]
    return [gathered_tasks(state, program.problems, ranks) if ranks.size > 1 else state for state in states]


def resumed(ranks: Ranks, name: str, saved: list[Any] | None) -> list[list[dict[str, Any]]]:
    """Return the states after three ticks, and after three more of a program that goes on from these or `saved`."""
    schedule = Schedule(over(ranks, PROGRAMS[name]()))
    for _ in range(3):
        schedule.tick()
    before, moment = whole(ranks, schedule), schedule.state_dict()
    schedule = Schedule(over(ranks, PROGRAMS[name]()))
    program = schedule.program
    states = before if saved is None else saved
    state, snapshots = [own_tasks(each, program.problems) for each in states] if ranks.size > 1 else states
    program.load_state_dict(state)
    schedule.load_state_dict({**moment, "snapshots": snapshots})
    for _ in range(3):
        schedule.tick()
    return [before, whole(ranks, schedule)]


RESUMED = "trajectory", "difference", "cg"


def merged(ranks: Ranks) -> bool:
    """Say whether a rank goes on with all tasks, in the state that a checkpoint of them has."""
    schedule = Schedule(over(ranks, PROGRAMS["adam"]()))
    schedule.tick()
    before = whole(ranks, schedule)[0]["learner"]
    merge_shards(schedule.program, ranks)
    learner = schedule.program.problems["learner"]
    after, names = learner.snapshot(), ("module", "optimizer")
    assert_identical(tensors({key: after[key] for key in names}), tensors({key: before[key] for key in names}))
    return learner.num_tasks == TASKS == len(learner.initial[0])


def config() -> Any:
    """Return a run of a few seconds, with evaluations between and at the end."""
    sizes = ["problems.learner.unroll_steps=2", "problems.learner.stream.repeat=2"]
    sizes += ["problems.meta.module.hidden=[4]", "problems.learner.module.hidden=[4]", "data.sizes.train=20"]
    sizes += [
        "problems.learner.tasks=4",
        "problems.learner.stream.batch_size=4",
        "data.sizes.val=5",
        "data.sizes.test=5",
    ]
    runner = {"devices": 2, "accelerator": "cpu", "report": "false", "progress_bar": "false", "log_every": 1}
    words = [f"runner.{key}={value}" for key, value in {**runner, "max_ticks": 4}.items()]
    analyses = [f"analyses.{name}.batch_size=5" for name in ("val", "test")]
    return compose(
        "implicit_maml", [*sizes, *words, *analyses, "logger=csv", "+problems.learner.optimizer.momentum=0.5"]
    )


def main(folder: Path, names: Iterable[str], num_ticks: int, settings: Any, saved: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(World.find(os.environ), torch.device("cpu")) as ranks:
        found: dict[str, Any] = {"programs": compute(ranks, names, num_ticks)}
        if settings is not None:
            found["resumed"] = {name: resumed(ranks, name, None) for name in RESUMED}
            found["from one"] = {name: resumed(ranks, name, saved[name]) for name in RESUMED}
            found["merged"], found["runs"] = merged(ranks), runs(folder, settings)
        torch.save(found, folder / f"rank_{ranks.rank}.pt")


Found = dict[str, Any]


def by_one_and_two(folder: Path, names: Iterable[str], num_ticks: int, settings: Any = None) -> list[Found]:
    """Return what one process computes, and what each of two does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = {name: resumed(Ranks(), name, None) for name in RESUMED} if settings is not None else {}

        def alone() -> Found:
            return {"programs": compute(Ranks(), names, num_ticks), "resumed": ends}

        saved = {name: before for name, (before, _) in ends.items()}
        found, of_ranks = run_ranks(main, 2, folder, names, num_ticks, settings, saved, meanwhile=alone)
    return [found, *of_ranks]


def far(expected: Any, own: Any, limit: float = 1e-10) -> dict[str, float]:
    """Return by how much tensors of nested containers differ where that is too much, as shares of the largest."""
    values, others = tensors(expected), tensors(own)
    assert {key: value.shape for key, value in values.items()} == {key: value.shape for key, value in others.items()}
    gaps = {key: (others[key] - x).abs().max() / x.abs().max().clamp_min(1e-12) for key, x in values.items()}
    return {key: float(gap) for key, gap in gaps.items() if not gap < limit}


def check_two_equal_one(alone: Found, *ranks: Found) -> None:
    """Compare the upper gradient at the start, the losses of all ticks, and all states after them."""
    for name, expected in alone["programs"].items():
        for own in ranks:
            # Of differences the rounding is larger.
            assert not far(expected, own["programs"][name], 1e-6 if name == "difference" else 1e-10), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the two ranks leave their files."""
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Found]:
    return by_one_and_two(folder, SOME, 6, config())


def test_two_ranks_equal_one_process_with_all_tasks(found: list[Found]) -> None:
    check_two_equal_one(*found)


@pytest.mark.slow
def test_so_they_do_after_many_ticks(tmp_path: Path) -> None:
    check_two_equal_one(*by_one_and_two(tmp_path, tuple(PROGRAMS), 52))


@pytest.mark.parametrize("name", RESUMED)
def test_a_state_of_all_tasks_goes_on_with_any_number_of_ranks(found: list[Found], name: str) -> None:
    """In the middle of an unroll, of a look-ahead, and with starts of solves."""
    limit = 1e-6 if name == "difference" else 1e-10
    alone = found[0]["resumed"][name]
    for each in found[1:]:
        assert not far(alone, each["resumed"][name], limit)
        assert not far(alone[1], each["from one"][name][1], limit)


def test_ranks_merge_their_tasks(found: list[Found]) -> None:
    assert all(each["merged"] for each in found[1:])


def test_a_run_is_that_of_one_process_and_goes_on_from_its_checkpoint(found: list[Found], folder: Path) -> None:
    settings = config()
    settings.runner.devices = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = run(settings, output_dir=folder / "alone")
    for each in found[1:]:
        first, second = each["runs"]
        assert first == second
        assert first == pytest.approx(alone.metrics, rel=1e-5)
    state, other = (read_checkpoint(folder / name / "checkpoints" / "last.ckpt") for name in ("alone", "parts"))
    assert not far(state["program"], other["program"], 1e-4)


def test_what_ranks_cannot_divide_is_refused() -> None:
    def refused(made: Program, expected: str) -> None:
        with pytest.raises(ConfigError, match=expected):
            over(Ranks(0, 3) if "multiple" in expected else Ranks(0, 2), made)

    refused(maml(FirstOrder()), r"problems\.learner\.tasks: found 4; expected a multiple of the 3 ranks\. Change tasks")
    still = Stream(episodes(), TASKS, repeat=2, shuffle=False)
    refused(maml(SABA(0.1), stream=still), r"problems\.learner\.hypergradient: .*; expected an implicit")
    rms = partial(torch.optim.RMSprop, lr=0.1)
    refused(maml(FirstOrder(), optimizer=rms), r"problems\.learner\.optimizer: .*RMSprop may mix the tasks")
    stream = Stream(episodes(), TASKS)
    given: Any = {"stream": stream, "optimizer": SGD, "hypergradient": Implicit(CG)}
    low = Problem("low", net(0), learn, roles={"model": "low", "start": "mid"}, **given)
    roles = {"model": "low", "own": "mid", "top": "top"}
    mid = Problem("mid", net(1), between, roles=roles, tasks=TASKS, **given)
    top = Problem("top", net(2), generalize, roles={"model": "mid"}, stream=stream, optimizer=SGD)
    graph = Graph({"top": ["mid"], "mid": ["low"]}, {"low": ["mid"], "mid": ["top"]})
    refused(
        Program([low, mid, top], graph),
        r"problems\.low\.tasks: found several ranks .* the same number as 'mid', since all ranks",
    )
    [fault] = stream_faults({"problems": {"w": {"tasks": 5}}, "runner": {"devices": 2}, "data": None})
    assert "problems.w.tasks: found 5 with runner.devices=2" in fault and "a multiple of 2" in fault
