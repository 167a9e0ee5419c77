"""What two ranks compute in tests/runner/test_distributed.py; `python -m tests.runner.two_ranks FOLDER` is one of them.

One pair of processes does all comparisons: starting one takes longer than everything that it computes.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.config import compose, hypergradient_options
from mlotool.core.errors import ConfigError, RunError
from mlotool.hypergradient import Unrolled
from mlotool.program import AbstractHypergradient, Program, Schedule, Stream
from mlotool.runner.distributed import agree_on_buffers, check_agreement, differences, distribute
from mlotool.runner.random_state import random_states, restore_random_states, with_own_steps
from mlotool.runner.ranks import BUCKET_BYTES, Ranks
from tests.hypergradient.every_algorithm import EVERY, Rows, program
from tests.program.small import Mlp, parameters, web

NUM_TICKS = 4
FOLLOWED = {"conf/finite_difference", "conf/cg", "conf/unrolled", "kept", "conf/soba", "conf/saba", "conf/penalty"}
"""By these, the equal shares of Meta-Weight-Net are followed for 50 ticks."""

TRILEVEL = {"u": ["w"]}, {"w": ["v"], "v": ["u"]}
NESTED = {"u": ["v"], "v": ["w"]}, {"w": ["v"], "v": ["u"]}

Make = Callable[[], AbstractHypergradient]


def options() -> dict[str, Make]:
    """Return every option of conf/hypergradient, but kfac, which differs."""
    found = {f"conf/{name}": make for name, make in hypergradient_options(compose("mwn")).items()}
    del found["conf/kfac"]
    return {**found, "kept": lambda: Unrolled(remat=False)}


def unequal(make: Make) -> Program:
    """Batches of 5, 5 and 2 samples of a lower problem, and of 11 and 1 of the upper one."""
    made = program(make)
    made.problems["model"].stream = Stream(Rows(1), 5, shuffle=False, drop_last=False)
    made.problems["weigher"].stream = Stream(Rows(2), 11, seed=2, drop_last=False)
    return made


PROGRAMS: dict[str, tuple[str, Callable[[Make], Program]]] = {
    "mwn": ("weigher", program),
    "unequal": ("weigher", unequal),
    "trilevel": ("u", lambda make: web(*TRILEVEL, hypergradient=make)),
    "nested": ("u", lambda make: web(*NESTED, hypergradient=make)),
}


def compute(ranks: Ranks) -> dict[str, dict[str, Tensor] | str]:
    """Return, by program and algorithm, the top gradient and the parameters after ticks, or why there are none."""
    found: dict[str, dict[str, Tensor] | str] = {}
    chosen = options()
    for kind, (top, build) in PROGRAMS.items():
        more = {name: make for name, make in EVERY.items() if kind == "mwn" and "_difference" not in name}
        for name, make in {**more, **chosen}.items():
            try:
                made = build(make)
            except ConfigError as error:
                found[f"{kind} {name}"] = str(error)
                continue
            distribute(made, ranks, seed=0)
            gradient = {f"gradient.{key}": value for key, value in made.gradient(top).items()}
            schedule = Schedule(made)
            for _ in range(50 if kind == "mwn" and name in FOLLOWED else NUM_TICKS):
                schedule.tick()
            found[f"{kind} {name}"] = {**gradient, **parameters(made)}
    return found


def restored(ranks: Ranks) -> dict[str, Any]:
    """Return what is drawn before and after a rank takes its states back, its recorded steps' included."""

    def made() -> Program:
        noisy = program(Unrolled, model=Mlp(nn.Dropout(0.5)))
        distribute(noisy, ranks, seed=3)
        return noisy

    saved = made()
    Schedule(saved).tick()
    states, state = random_states(saved, ranks), ranks.first(saved.state_dict())
    drawn = torch.rand(1).item()
    resumed = made()
    resumed.load_state_dict(with_own_steps(state, states, ranks))
    restore_random_states(states, ranks)
    steps = [
        each["model"]["trajectory"]["steps"][0]["random"][0]["cpu"]
        for each in (saved.state_dict(), state, resumed.state_dict())
    ]
    return {"drawn": [drawn, torch.rand(1).item()], "steps": steps}


def exchanges(ranks: Ranks) -> dict[str, Any]:
    """Return what ranks tell each other, and what they find wrong."""
    rank = float(ranks.rank)
    many = [torch.full((BUCKET_BYTES // 4,), rank), torch.tensor(4.0 * rank), torch.full((3, 2), rank)]
    mixed = [torch.tensor([rank], dtype=torch.float64), torch.tensor([2.0 * rank])]
    x = torch.tensor([1.0 + rank], requires_grad=True)
    [mean] = ranks.mean([x**2])
    [slope] = torch.autograd.grad(mean * (1.0 + rank), x, create_graph=True)
    [curvature] = torch.autograd.grad(slope, x)
    normed = Mlp(nn.BatchNorm1d(5).double(), nn.Dropout(0.5))
    other = program(EVERY["identity"], model=normed)
    distribute(other, ranks, seed=0)
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
        "derivatives": [mean.item(), slope.item(), curvature.item()],
        "first": ranks.first(ranks.rank),
        "gather": ranks.gather(ranks.rank),
        "any": [ranks.any(ranks.rank == 1), ranks.any(False)],
        "differences": texts,
        "restored": restored(ranks),
        "noise": noise,
        "buffers": [before, [buffer.clone() for buffer in normed.buffers()]],
        "diverged": _message(lambda: check_agreement(other, ranks, tick=7)),
        "start": _message(lambda: distribute(program(EVERY["identity"], model=Mlp(seed=ranks.rank)), ranks, 0)),
    }


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except (ConfigError, RunError) as error:
        return str(error)
    return "nothing was raised"


def main(folder: Path) -> None:
    import os

    from mlotool.runner.ranks import joined
    from mlotool.runner.world import World

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(World.find(os.environ), torch.device("cpu")) as ranks:
        found = {"programs": compute(ranks), "exchanges": exchanges(ranks)}
        torch.save(found, folder / f"rank_{ranks.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
