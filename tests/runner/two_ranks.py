"""What two ranks compute in tests/runner/test_distributed.py: one pair of processes does all comparisons."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.config import compose, hypergradient_options
from mlotool.core.errors import ConfigError, RunError
from mlotool.distributed.collectives import BUCKET_BYTES, Ranks
from mlotool.hypergradient import (
    ConjugateGradient,
    FirstOrder,
    Implicit,
    NormalEquationConjugateGradient,
    Unrolled,
)
from mlotool.problem.rank_mean import RankMean
from mlotool.program import AbstractHypergradient, Program, Schedule, Stream
from mlotool.runner.distributed import agree_on_buffers, check_agreement, differences
from mlotool.runner.launcher import World, joined
from mlotool.runner.random_state import random_states, restore_random_states, with_own_snapshots, with_own_steps
from tests.hypergradient.every_algorithm import EVERY, Batch, Rows, program, weighted
from tests.hypergradient.stranger import Stranger
from tests.over_ranks import over
from tests.program.small import Mlp, parameters, web

NUM_TICKS, NUM_FOLLOWED, NUM_MANY = 3, 12, 50
FOLLOWED = {"conf/finite_difference", "conf/cg", "conf/unrolled", "kept", "conf/soba", "conf/saba", "conf/penalty"}
"""By these, the equal shares of Meta-Weight-Net are followed for `NUM_FOLLOWED` ticks in the ordinary tests as well."""

TRILEVEL = {"u": ["w"]}, {"w": ["v"], "v": ["u"]}
NESTED = {"u": ["v"], "v": ["w"]}, {"w": ["v"], "v": ["u"]}

Make = Callable[[], AbstractHypergradient]


def options() -> dict[str, Make]:
    """Return every option of conf/hypergradient, but kfac, which differs."""
    found = {f"conf/{name}": make for name, make in hypergradient_options(compose("mwn")).items()}
    del found["conf/kfac"]
    return {**found, "kept": lambda: Unrolled(remat=False), "again": lambda: Unrolled(remat=True), "stranger": Stranger}


def damped() -> dict[str, Make]:
    """Return the same, but with a damping where an ill-conditioned solve would amplify the rounding tick by tick."""
    solver = NormalEquationConjugateGradient
    return {**options(), "conf/normal_cg": lambda: Implicit(solver(10, 1e-10, damping=10.0), "reverse")}


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


PROGRAMS: dict[str, tuple[str, Callable[[Make], Program]]] = {
    "mwn": ("weigher", program),
    "unequal": ("weigher", unequal),
    "trilevel": ("u", lambda make: web(*TRILEVEL, hypergradient=make)),
    "nested": ("u", lambda make: web(*NESTED, hypergradient=make)),
    "difference": (
        "u",
        in_the_middle(lambda: Implicit(ConjugateGradient(3, 1e-8, damping=1.0), "finite_difference")),
    ),
    "unrolled": ("u", in_the_middle(Unrolled)),
}


def compute(ranks: Ranks, num_ticks: int | None = None) -> dict[str, dict[str, Tensor] | str]:
    """Return, by program and algorithm, the top gradient and the parameters after ticks, or why there are none."""
    found: dict[str, dict[str, Tensor] | str] = {}
    chosen = options() if num_ticks is None else damped()
    for kind, (top, build) in PROGRAMS.items():
        more = {name: make for name, make in EVERY.items() if kind == "mwn" and "_difference" not in name}
        for name, make in {**more, **chosen}.items():
            try:
                made = over(ranks, build(make))
            except ConfigError as error:
                found[f"{kind} {name}"] = str(error)
                continue
            gradient = {f"gradient.{key}": value for key, value in made.gradient(top).items()}
            schedule = Schedule(made)
            is_followed = kind == "mwn" and name in FOLLOWED
            # Unequal shares go on into a second epoch of three batches.
            few = NUM_TICKS + (kind == "unequal")
            for _ in range(num_ticks or (NUM_FOLLOWED if is_followed else few)):
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
    resumed.load_state_dict(with_own_steps(state, states, ranks))
    restore_random_states(states, resumed, ranks)
    programs = saved.state_dict(), state, resumed.state_dict()
    schedules = moment, shared, with_own_snapshots(shared, states, ranks)
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
    resumed.load_state_dict(with_own_steps(state, states, ranks))
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
        scales.append(made.problems["model"].loss_scale.value)  # type: ignore[union-attr]
    return {"scales": scales, "parameters": parameters(made)}


def exchanges(ranks: Ranks) -> dict[str, Any]:
    """Return what ranks tell each other, and what they find wrong."""
    rank = float(ranks.rank)
    many = [torch.full((BUCKET_BYTES // 4,), rank), torch.tensor(4.0 * rank), torch.full((3, 2), rank)]
    mixed = [torch.tensor([rank], dtype=torch.float64), torch.tensor([2.0 * rank])]
    x = torch.tensor([1.0 + rank], requires_grad=True)
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
        "many": [tensor.flatten()[-1].item() for tensor in ranks.mean(many)],
        "mixed": [(tensor.item(), tensor.dtype) for tensor in ranks.mean(mixed)],
        "derivatives": [each.item() for each in (mean, slope, curvature, third)],
        "first": ranks.first(ranks.rank),
        "gather": ranks.gather(ranks.rank),
        "any": [ranks.any(ranks.rank == 1), ranks.any(False)],
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


def main(folder: Path, num_ticks: int | None = None) -> None:
    """Be one of them; with a number of ticks, follow all algorithms in all programs so long, and do nothing else."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(World.find(os.environ), torch.device("cpu")) as ranks:
        found: dict[str, Any] = {"programs": compute(ranks, num_ticks)}
        if num_ticks is None:
            found["exchanges"] = exchanges(ranks)
        torch.save(found, folder / f"rank_{ranks.rank}.pt")
