"""What several processes compute in test_processes.py: one set of them does all comparisons."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mlotool.core.errors import ConfigError, RunError
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import Implicit, OptimizerPreconditioner
from mlotool.program import Program, Schedule, Stream
from mlotool.runner.distributed import agree_on_buffers, check_agreement
from mlotool.runner.run_config import World, joined
from tests.layerparallel import real_models
from tests.layerparallel.auxiliary.small import KINDS, Rows, alone, auxiliary, reweighted, stack
from tests.over_ranks import over

Make = Callable[..., Program]
NUM_TICKS = 3
ALONE: dict[str, dict[str, Any]] = {
    "lagrangian": {"noise": 0.1, "method": "lagrangian", **KINDS["mean"]},
    "auxnet": {"noise": 0.1, **KINDS["auxnet"]},
    "chain": KINDS["chain"],
    "recursive": {"noise": 0.1, **KINDS["recursive"]},
    "recalibrated": {"recalibrate": 2},
}
adam = partial(torch.optim.Adam, lr=0.02)


def programs(num_stages: int, *, processes: bool) -> dict[str, Program]:
    """Return programs by name; those of one process and those of several are made alike.

    Args:
        num_stages: K.
        processes: whether each stage gets a process of its own, where there are several.
    """
    cuts = {2: ["2"], 3: ["1", "3"], 4: ["1", "2", "3"]}
    more = {"stages": num_stages, "cut": cuts[num_stages], "processes": processes}
    made: dict[str, Program] = {}
    for kind, settings in ALONE.items():
        # Two batches an epoch: the third step meets samples again.
        how: dict[str, Any] = {"optimizer": adam, "stream": Stream(Rows(8), 4, seed=1)}
        made[f"alone {kind}"] = alone(auxiliary(**more, **settings), stack(norm=processes), **how)
    if not processes:
        # The derivatives of a chain pass through its networks only where there are two or more.
        made["alone chain of two networks"] = alone(auxiliary(**KINDS["chain"]), optimizer=adam)
    sama = {"hypergradient": Implicit(OptimizerPreconditioner(), "finite_difference"), "optimizer": adam}
    made["lower preconditioned"] = reweighted(auxiliary(**more, **KINDS["chain"]), **sama)
    made["lower rolled back"] = reweighted(auxiliary(**more), optimizer=adam, roll_back=True, unroll_steps=2)
    made["lower unequal"] = reweighted(auxiliary(**more), stream=Stream(Rows(), 5, seed=1, drop_last=False))
    return made


def refused(ranks: Ranks) -> dict[str, str]:
    """Return what is said of what several processes cannot do."""
    two: dict[str, Any] = {"stages": 2, "cut": ["2"]}
    cases: dict[str, Callable[[], Program]] = {
        "clip": lambda: alone(auxiliary(processes=True, **two), gradient_clip_norm=1.0),
        "stages": lambda: alone(auxiliary(processes=True)),
        # The last one: the process that evaluates the loss ends, and the other one has lost it, in a later tick if its
        # messages of the first one have left already.
        "beside": lambda: alone(auxiliary(processes=True, **two), loss=decayed),
    }
    found = {}
    for name, make in cases.items():
        try:
            program = over(ranks, make())
            schedule = Schedule(program)
            for _ in range(100):
                schedule.tick()
        except (ConfigError, RunError) as error:
            found[name] = str(error)
    return found


def decayed(batch: Any, *, model: Any) -> Any:
    squares = sum(each.square().sum() for each in model.parameters())
    return (model(batch["input"]) - batch["target"]).square().sum(1).mean() + squares


def compute(ranks: Ranks, num_stages: int, *, processes: bool) -> dict[str, dict[str, Any]]:
    """Return, by program, its state, the upper gradient, losses and statistics after some ticks."""
    found = {}
    for name, made in programs(num_stages, processes=processes).items():
        program = over(ranks, made)
        schedule, losses = Schedule(program), []
        for _ in range(NUM_TICKS):
            losses.append(schedule.tick()["net"].loss.item())
        top = "weigher" if "weigher" in program.problems else "net"
        gradient = program.gradient(top)
        check_agreement(program, ranks, tick=NUM_TICKS)
        agree_on_buffers(program, ranks)
        state = program.state_dict()
        found[name] = {
            "net": state["net"]["module"],
            "optimizer": state["net"]["optimizer"]["state"],
            "parallel": state["net"]["parallel"],
            "gradient": gradient,
            "loss": losses,
            "statistics": program.statistics(),
        }
    return found


def resumed(ranks: Ranks) -> dict[str, Any]:
    """Return the parameters of a run that goes on from what rank 0 has saved, and of one that was never saved."""
    ends = []
    for is_saved in (False, True):
        program = over(ranks, programs(2, processes=True)["alone auxnet"])
        schedule = Schedule(program)
        schedule.tick()
        if is_saved:
            state = ranks.first(program.state_dict())
            program = over(ranks, programs(2, processes=True)["alone auxnet"])
            program.load_state_dict(state)
            schedule = Schedule(program)
        schedule.tick()
        ends.append(program.state_dict()["net"]["module"])
    return {"whole": ends[0], "resumed": ends[1]}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(World.find(os.environ), torch.device("cpu")) as ranks:
        found: dict[str, Any] = {}
        if ranks.size % 2 == 0:
            found["stages"] = compute(ranks, 2, processes=True)
        if ranks.size == 2:
            found["parts"] = compute(ranks, 2, processes=False)
            found["resumed"] = resumed(ranks)
            found["models"] = real_models.compute(ranks, over_ranks=True)
            found["refused"] = refused(ranks)
        else:
            found["each"] = compute(ranks, ranks.size, processes=True)
        torch.save(found, folder / f"rank_{ranks.rank}.pt")
