"""Two ranks: real processes that talk by gloo, against one rank with the joined batches."""

import os
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.config import hypergradient_options
from mlotool.core.errors import ConfigError, RunError
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import ConjugateGradient, FirstOrder, Implicit, NormalEquationConjugateGradient, Unrolled
from mlotool.problem.rank_mean import RankMean
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule, Stream
from mlotool.runner.checkpoint import put_own, random_states, restore_random_states
from mlotool.runner.distributed import agree_on_buffers, check_agreement, differences
from mlotool.runner.run_config import World, joined
from tests.hypergradient.every_algorithm import EVERY, Batch, Rows, program, weighted
from tests.hypergradient.stranger import Stranger
from tests.over_ranks import over
from tests.program.small import Mlp, parameters, web
from tests.runner.processes import run_ranks

SOME = ("finite_difference", "cg", "unrolled", "soba", "saba", "penalty", "first_order")
"""Of conf/hypergradient: one of each kind, with what they keep between ticks."""

TRILEVEL = {"u": ["w"]}, {"w": ["v"], "v": ["u"]}
NESTED = {"u": ["v"], "v": ["w"]}, {"w": ["v"], "v": ["u"]}

Make = Callable[[], AbstractHypergradient]


def options() -> dict[str, Make]:
    """Return every option of conf/hypergradient, but kfac, which differs; normal_cg would amplify rounding undamped."""
    found = {f"conf/{name}": make for name, make in hypergradient_options({"seed": 0}).items()}
    del found["conf/kfac"]
    solver = NormalEquationConjugateGradient(10, 1e-10, damping=10.0)
    found["conf/normal_cg"] = lambda: Implicit(solver, "reverse")
    return {**found, "kept": lambda: Unrolled(remat=False), "again": lambda: Unrolled(remat=True), "stranger": Stranger}


def unequal(make: Make) -> Program:
    """Batches of 5, 5 and 2 samples of a lower problem, and of 11 and 1 of the upper one."""
    made = program(make)
    made.problems["model"].stream = Stream(Rows(1), 5, shuffle=False, drop_last=False)
    made.problems["weigher"].stream = Stream(Rows(2), 11, seed=2, drop_last=False)
    return made


def in_the_middle(middle: Make) -> Callable[[Make], Program]:
    """Return what makes the nested program with an algorithm of its own at the problem that shapes and reads."""

    def build(make: Make) -> Program:
        makes = {"u": FirstOrder, "v": middle, "w": make}
        order = iter(makes.values())
        return web(*NESTED, order=makes, hypergradient=lambda: next(order)())

    return build


# By name: the top problem, what builds it, and ticks. Unequal shares go on into a second epoch of three batches.
PROGRAMS: dict[str, tuple[str, Callable[[Make], Program], int]] = {
    "mwn": ("weigher", program, 2),
    "unequal": ("weigher", unequal, 4),
    "trilevel": ("u", lambda make: web(*TRILEVEL, hypergradient=make), 2),
    "nested": ("u", lambda make: web(*NESTED, hypergradient=make), 2),
    "difference": (
        "u",
        in_the_middle(lambda: Implicit(ConjugateGradient(3, 1e-8, damping=1.0), "finite_difference")),
        2,
    ),
    "unrolled": ("u", in_the_middle(Unrolled), 2),
}


def compute(ranks: Ranks, *, of_all: Sequence[str]) -> dict[str, dict[str, Tensor] | str]:
    """Return, by program and algorithm, the top gradient and the parameters after ticks, or why there are none.

    Args:
        ranks: those that share the batches.
        of_all: programs in which all of conf/ are there; of others, there are some.
    """
    found: dict[str, dict[str, Tensor] | str] = {}
    chosen = options()
    some = {name: chosen[name] for name in ("kept", *(f"conf/{name}" for name in SOME))}
    own = {name: make for name, make in EVERY.items() if "_difference" not in name}
    # By default those that are no option.
    beside = {name: make for name, make in own.items() if f"conf/{name}" not in chosen}
    makes_of_kinds = {**dict.fromkeys(of_all, chosen), "mwn": {**own, **chosen} if "mwn" in of_all else beside}
    for kind, (top, build, num_ticks) in PROGRAMS.items():
        for name, make in makes_of_kinds.get(kind, some).items():
            try:
                made = over(ranks, build(make))
            except ConfigError as error:
                found[f"{kind} {name}"] = str(error)
                continue
            gradient = {f"gradient.{key}": value for key, value in made.gradient(top).items()}
            schedule = Schedule(made)
            for _ in range(num_ticks):
                schedule.tick()
            found[f"{kind} {name}"] = {**gradient, **parameters(made)}
    return found


def restored(ranks: Ranks) -> dict[str, Any]:
    """Return what is drawn before and after a rank takes its states back, its recorded steps' and buffers included."""

    def made() -> Program:
        noisy = program(Unrolled, model=Mlp(nn.BatchNorm1d(5).double(), nn.Dropout(0.5)), roll_back=True)
        return over(ranks, noisy, seed=3)

    saved = made()
    schedule = Schedule(saved)
    for _ in range(3):
        schedule.tick()
    moment = schedule.state_dict()
    states, state = random_states(saved, ranks, moment["snapshots"]), ranks.first(saved.state_dict())
    shared = ranks.first(moment)
    drawn = torch.rand(1).item()
    resumed = made()
    own = deepcopy({"program": state, "schedule": shared, "random_states": states})
    put_own(own, ranks)
    resumed.load_state_dict(own["program"])
    restore_random_states(states, resumed, ranks)
    programs = saved.state_dict(), state, resumed.state_dict()
    schedules = moment, shared, own["schedule"]
    return {
        "drawn": [drawn, torch.rand(1).item()],
        "steps": [each["model"]["trajectory"]["steps"][0]["random"][0]["cpu"] for each in programs],
        "means": [each["model"]["module"]["body.1.running_mean"] for each in programs],
        "snapshots": [each["snapshots"]["model"]["module"]["body.1.running_mean"] for each in schedules],
        "readings": restored_readings(ranks),
    }


def restored_readings(ranks: Ranks) -> list[Tensor]:
    """Return the random state of a step that led to a solution which a recorded step has read."""

    def made() -> Program:
        both = web(*NESTED, hypergradient=Unrolled, settings={"w": {"unroll_steps": 2}})
        return over(ranks, both, seed=3)

    saved = made()
    schedule = Schedule(saved)
    for _ in range(2):
        torch.rand(1)
        schedule.tick()
    states, state = random_states(saved, ranks), ranks.first(saved.state_dict())
    resumed = made()
    own = deepcopy({"program": state, "schedule": {"snapshots": {}}, "random_states": states})
    put_own(own, ranks)
    resumed.load_state_dict(own["program"])
    steps = [each["v"]["trajectory"]["steps"][0] for each in (saved.state_dict(), state, resumed.state_dict())]
    return [each["readings"]["w"]["steps"][1]["random"][0]["cpu"] for each in steps]


def scaled_losses(ranks: Ranks) -> dict[str, Any]:
    """Return the loss scale by tick, and the parameters, where a sample of one rank overflows at the first scale."""
    rare = Rows(1)[5]["input"]

    def overflowing(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
        is_rare = (batch["input"] == rare).all(1)
        return ((1.0 + 1e305 * is_rare.double()) * weighted(batch, model=model, weigher=weigher)).mean()

    made = over(ranks, program(FirstOrder, lower=overflowing, precision="fp16"))
    schedule, scales = Schedule(made), []
    for _ in range(3):
        schedule.tick()
        scales.append(made.problems["model"].optimizer_step.loss_scale.value)  # type: ignore[union-attr]
    return {"scales": scales, "parameters": parameters(made)}


def exchanges(ranks: Ranks) -> dict[str, Any]:
    """Return what ranks tell each other, and what they find wrong."""
    rank = float(ranks.rank)
    # The loss of rank r is (r + 1) x^3 at x = 2.
    shared = RankMean(ranks.mean)
    x = torch.tensor(2.0, requires_grad=True)
    mean = shared.value(lambda point: (1.0 + rank) * point[0] ** 3, [x])
    [slope] = torch.autograd.grad(mean, x, create_graph=True)
    [curvature] = torch.autograd.grad(slope, x, create_graph=True)
    [third] = torch.autograd.grad(curvature, x)
    normed = Mlp(nn.BatchNorm1d(5).double(), nn.Dropout(0.5))
    other = over(ranks, program(EVERY["identity"], model=normed))
    texts = list(differences(other))
    Schedule(other).tick()
    noise = torch.rand(1).item()
    before = [buffer.clone() for buffer in normed.buffers()]
    agree_on_buffers(other, ranks)
    check_agreement(other, ranks, tick=1)
    with torch.no_grad():
        other.problems["model"].theta["body.0.bias"].add_(rank)
    return {
        "derivatives": [each.item() for each in (mean, slope, curvature, third)],
        "differences": texts,
        "restored": restored(ranks),
        "scaled": scaled_losses(ranks),
        "noise": noise,
        "buffers": [before, [buffer.clone() for buffer in normed.buffers()]],
        "diverged": _message(lambda: check_agreement(other, ranks, tick=7)),
        "start": _message(lambda: over(ranks, program(EVERY["identity"], model=Mlp(seed=ranks.rank)))),
    }


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except (ConfigError, RunError) as error:
        return str(error)
    return "nothing was raised"


def main(folder: Path, of_all: Sequence[str]) -> None:
    """Be one of them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(World.find(os.environ), torch.device("cpu")) as ranks:
        found = {"programs": compute(ranks, of_all=of_all), "exchanges": exchanges(ranks)}
        torch.save(found, folder / f"rank_{ranks.rank}.pt")


Found = dict[str, Any]


def by_one_and_two(folder: Path, *of_all: str) -> tuple[Found, Found, Found]:
    """Return what one rank computes, and what each of two does."""

    def alone() -> Found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"programs": compute(Ranks(), of_all=of_all)}

    found, (first, second) = run_ranks(main, 2, folder, of_all, meanwhile=alone)
    return found, first, second


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found, Found]:
    return by_one_and_two(tmp_path_factory.mktemp("ranks"), "unequal")


@pytest.mark.slow
def test_so_they_do_with_all_of_conf_in_each_program(tmp_path: Path) -> None:
    check_two_equal_one(by_one_and_two(tmp_path, *PROGRAMS))


def test_two_ranks_equal_one_rank_with_the_joined_batches(found: tuple[Found, Found, Found]) -> None:
    check_two_equal_one(found)


def check_two_equal_one(found: tuple[Found, Found, Found]) -> None:
    alone, first, second = (each["programs"] for each in found)
    assert alone.keys() == first.keys() == second.keys()
    wrong = {}
    for case, expected in alone.items():
        if isinstance(expected, str):
            assert first[case] == expected
            continue
        assert all(torch.equal(first[case][name], second[case][name]) for name in expected), case
        error = max(_error(first[case][name], value) for name, value in expected.items())
        if not error < 1e-9:
            wrong[case] = error
    assert not wrong


def _error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


class WithTwice(Ranks):
    """Beside a rank that has three times this one's values."""

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [2 * each for each in tensors]


def test_the_mean_of_buffers_leaves_what_a_backward_pass_has_kept() -> None:
    """A step that is recorded before an evaluation may be differentiated after it."""
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    program = Program([Problem("net", net, lambda batch, *, model: model(batch), roles={"model": "net"})], Graph())
    loss = net(torch.randn(4, 2)).pow(3).sum()
    before = {name: each.clone() for name, each in net.named_buffers()}
    agree_on_buffers(program, WithTwice(0, 2))
    loss.backward()
    assert torch.equal(net[1].running_var, 2 * before["1.running_var"])
    assert torch.equal(net[1].num_batches_tracked, before["1.num_batches_tracked"])


def test_the_mean_over_ranks_is_differentiated_three_times(found: tuple[Found, Found, Found]) -> None:
    for each in found[1:]:
        # Of 1.5 x^3 at x = 2.
        assert each["exchanges"]["derivatives"] == [12.0, 18.0, 18.0, 9.0]


def test_noise_differs_by_rank_and_buffers_are_averaged(found: tuple[Found, Found, Found]) -> None:
    first, second = (each["exchanges"] for each in found[1:])
    assert first["noise"] != second["noise"]
    means = [(a + b) / 2 for a, b in zip(first["buffers"][0][:2], second["buffers"][0][:2], strict=True)]
    assert not torch.equal(first["buffers"][0][0], second["buffers"][0][0])
    for one in (first, second):
        assert all(map(torch.equal, one["buffers"][1][:2], means))
    assert [text.partition(" ")[2].partition(" ")[0] for text in first["differences"]] == ["BatchNorm1d"]


def test_each_rank_takes_its_own_states_back(found: tuple[Found, Found, Found]) -> None:
    first, second = (each["exchanges"]["restored"] for each in found[1:])
    for one in (first, second):
        assert one["drawn"][0] == one["drawn"][1]
    assert first["drawn"] != second["drawn"]
    for key in ("steps", "means", "snapshots", "readings"):
        for own, _, taken in (first[key], second[key]):
            assert torch.equal(own, taken), key
        own, of_first, _ = second[key]
        assert not torch.equal(own, of_first), key


def test_a_step_is_skipped_by_all_ranks_or_none(found: tuple[Found, Found, Found]) -> None:
    first, second = (each["exchanges"]["scaled"] for each in found[1:])
    assert first["scales"] == second["scales"]
    # The second batch has the sample that overflows.
    assert first["scales"] == [2.0**16, 2.0**15, 2.0**15]
    for key, value in first["parameters"].items():
        assert value.isfinite().all(), key
        assert torch.equal(value, second["parameters"][key]), key


def test_ranks_that_differ_are_found(found: tuple[Found, Found, Found]) -> None:
    for each in found[1:]:
        assert "parameters of problem 'model' are no longer the same on all ranks" in each["exchanges"]["diverged"]
        assert "after tick 7" in each["exchanges"]["diverged"]
        assert "problems.model.module: the ranks have built it with different" in each["exchanges"]["start"]


def test_the_environment_says_where_a_process_stands() -> None:
    assert World.find({}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    found = World.find({**torchrun, "MASTER_ADDR": "there", "MASTER_PORT": "7"})
    assert found == World(rank=3, size=4, local_rank=1, local_size=2, address="there", port=7)
    with pytest.raises(ConfigError, match="not MASTER_ADDR, MASTER_PORT"):
        World.find(torchrun)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_JOB_ID": "40"}
    found = World.find({**slurm, "SLURM_NODELIST": "gpu[007-010],cpu1", "SLURM_TASKS_PER_NODE": "2(x3),1"})
    assert found == World(rank=5, size=7, local_rank=1, local_size=2, address="gpu007", port=15040)
    assert World.find({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


def test_devices_are_the_processes_of_the_machine() -> None:
    world = World(rank=0, size=4, local_rank=0, local_size=2, address="here", port=1)
    world.check_devices(2)
    world.check_devices("auto")
    with pytest.raises(ConfigError, match=r"runner\.devices: found 1, but 2 processes were started here"):
        world.check_devices(1)
