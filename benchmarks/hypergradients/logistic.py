"""Fig. 3 of Betty's paper: the upper loss of weight-decay search, against upper steps and against time.

100 lower steps from zero for each upper step (SGD, 0.1), as in Betty's own example; the upper problem takes SGD of
learning rate 1 and momentum 0.9, and decays stay positive.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.hypergradients import ours, pictures, tasks
from benchmarks.hypergradients.betty_peer import make_engine
from mlotool.hypergradient import Penalty
from mlotool.program import Schedule

NUM_LOWER_STEPS = 100
KINDS = {
    "unrolled": "ITD-RMAD",
    "truncated": "truncated to half",
    "finite_difference": "AID-FD",
    "neumann": "AID-Neumann",
    "cg": "AID-CG",
    "normal_cg": "normal CG",
    "nystrom": "Nystrom",
    "exact": "exact solve",
    "sama": "SAMA",
    "penalty": "penalty",
    "soba": "SOBA",
    "saba": "SABA",
}
IN_BETTY = ("finite_difference", "neumann", "cg")
LEAST_DECAY = 1e-8

Run = tuple[Callable[[], None], nn.Module, nn.Module]


def task() -> tasks.Bilevel:
    """Return the task: weights at zero, decays at one."""
    start = torch.ones(tasks.NUM_FEATURES)

    def make_lower() -> nn.Module:
        module = nn.Linear(tasks.NUM_FEATURES, 1, bias=False)
        nn.init.zeros_(module.weight)
        return module

    return replace(
        tasks.logistic(),
        make_lower=make_lower,
        make_upper=lambda: tasks.PerParameterDecay(start),
        learning_rate=0.1,
        num_steps=NUM_LOWER_STEPS,
    )


def measure(folder: Path, has_betty: bool, num_upper_steps: int) -> dict[str, Any]:
    """Return the curves, and draw them.

    Args:
        folder: where the picture goes.
        has_betty: whether to run Betty as well.
        num_upper_steps: of each run.
    """
    rows = []
    runs: dict[str, Callable[[], Run]] = {name: partial(_ours, kind) for kind, name in KINDS.items()}
    if has_betty:
        runs |= {f"{KINDS[kind]} (Betty)": partial(_betty, kind) for kind in IN_BETTY}
    for name, build in runs.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows.append({"name": name, **_curve(build, num_upper_steps)})
        last = rows[-1]
        print(f"{name}: upper loss {last['loss'][-1]:.4f} after {last['seconds'][-1]:.2f} s of CPU", flush=True)
    curves = [pictures.Curve(row["name"], [row["step"], row["seconds"]], row["loss"]) for row in rows]
    title = f"Weight decay of a logistic regression, {NUM_LOWER_STEPS} lower steps an upper one"
    labels = ["upper steps", "CPU seconds, one thread"]
    pictures.draw(folder / "hypergradients_logistic.png", title, labels, "upper (validation) loss", curves, "y")
    return {"num_lower_steps": NUM_LOWER_STEPS, "rows": rows}


def _curve(build: Callable[[], Run], num_upper_steps: int) -> dict[str, list[float]]:
    cycle, lower, _ = build()
    batch = tasks.logistic_data()[1]
    found: dict[str, list[float]] = {"step": [], "seconds": [], "loss": []}
    elapsed = 0.0
    for number in range(1, num_upper_steps + 1):
        start = time.process_time()
        cycle()
        elapsed += time.process_time() - start
        with torch.no_grad():
            loss = float(tasks.logistic_loss(lower, batch))
        for key, value in (("step", number), ("seconds", elapsed), ("loss", loss)):
            found[key].append(value)
    return found


def _ours(kind: str) -> Run:
    problem = task()
    algorithm = ours.algorithm_of(kind, problem)
    if kind == "penalty":
        # The second iterate begins and is trained as the weights are; a multiplier of 1000 diverges at this upper rate.
        algorithm = Penalty(multiplier=10.0, num_steps=NUM_LOWER_STEPS, step_size=0.1, warm_start=False)
    program = ours.make_program(problem, algorithm, kind, NUM_LOWER_STEPS, reset_to="initial")
    upper, lower = program.problems["upper"], program.problems["lower"]
    upper.optimizer = torch.optim.SGD(upper.module.parameters(), lr=1.0, momentum=0.9)
    schedule = Schedule(program)

    def cycle() -> None:
        for _ in range(schedule.cycle_length()):
            schedule.tick()
        _keep_positive(upper.module)

    return cycle, lower.module, upper.module


def _betty(kind: str) -> Run:
    problem = task()
    engine, lower, upper = make_engine(
        problem,
        kind,
        num_steps=NUM_LOWER_STEPS,
        upper_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9),
        hooks={
            "on_inner_loop_start": lambda self: self.module.weight.data.zero_(),
            "param_callback": lambda self: _keep_positive(self.module),
        },
    )

    def cycle() -> None:
        for _ in range(NUM_LOWER_STEPS):
            engine.global_step += 1
            engine.train_step()

    return cycle, lower.module, upper.module


def _keep_positive(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(min=LEAST_DECAY)
