"""Single-loop and iterative methods on a stochastic quadratic: the value function's gradient against oracle calls.

    lower  g(x, z) = mean_i  (a_i.z)^2 / 2 + (b_i.x)^2 / 2 + (p_i.x)(r_i.z) + c_i.z + d_i.x,   upper likewise

After the description of benchmark_bilevel (Dagreou et al. 2022): 1024 samples a level, 100 variables a level, mean
Hessians with eigenvalues from 0.1 to 1 (the upper variables' from 0), cross matrices with singular values up to 0.1,
batches of 64, constant steps chosen from a grid for each method.
"""

import itertools
import math
import warnings
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.betty.task import CyclingBatches
from benchmarks.hypergradients import pictures
from mlotool.hypergradient import (
    SABA,
    ConjugateGradient,
    FixedPoint,
    Identity,
    Implicit,
    Neumann,
    Penalty,
    Unrolled,
)
from mlotool.program import Graph, Problem, Program, Schedule

NUM_SAMPLES, SIZE, BATCH_SIZE = 1024, 100, 64
LOWER_RATES, RATIOS = (0.1, 0.3), (0.1, 0.3, 1.0)
"""Lower learning rates, and upper ones over these."""
NUM_STEPS = 10
"""Lower steps of an upper one, of the methods with an inner loop."""


@dataclass(frozen=True)
class Level:
    """The samples of one level: each row a vector of one sample."""

    a: Tensor
    b: Tensor
    p: Tensor
    r: Tensor
    c: Tensor
    d: Tensor

    def batch(self, part: slice) -> dict[str, Any]:
        """Return some of the samples."""
        rows = {key: getattr(self, key)[part] for key in "abprcd"}
        return {**rows, "number": part.start // BATCH_SIZE}

    def means(self) -> dict[str, Tensor]:
        """Return the matrices and vectors of the mean."""
        count = len(self.a)
        return {
            "zz": self.a.T @ self.a / count,
            "xx": self.b.T @ self.b / count,
            "xz": self.p.T @ self.r / count,
            "z": self.c.mean(0),
            "x": self.d.mean(0),
        }


def _level(seed: int) -> Level:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def root(smallest: Tensor) -> Tensor:
        basis = torch.linalg.qr(normal(SIZE, SIZE))[0]
        return basis * smallest @ basis.T

    eigenvalues = torch.logspace(-1, 0, SIZE, dtype=torch.float64)
    flat = torch.cat([torch.zeros(1, dtype=torch.float64), eigenvalues[1:]])
    left, right = (torch.linalg.qr(normal(SIZE, SIZE))[0] for _ in range(2))
    shared = normal(NUM_SAMPLES, SIZE)
    return Level(
        normal(NUM_SAMPLES, SIZE) @ root(eigenvalues.sqrt()),
        normal(NUM_SAMPLES, SIZE) @ root(flat.sqrt()),
        shared * (0.1 * eigenvalues) @ left.T,
        shared @ right.T,
        normal(NUM_SAMPLES, SIZE),
        normal(NUM_SAMPLES, SIZE),
    )


@lru_cache
def data() -> tuple[Level, Level]:
    """Return the samples of the lower and the upper level: the first seed whose value function is convex."""
    for seed in range(0, 40, 2):
        lower, upper = _level(seed), _level(seed + 1)
        low, high = lower.means(), upper.means()
        slope = -torch.linalg.solve(low["zz"], low["xz"].T)
        cross = high["xz"] @ slope
        hessian = slope.T @ high["zz"] @ slope + high["xx"] + cross + cross.T
        if float(torch.linalg.eigvalsh(hessian)[0]) > 1e-12:
            return lower, upper
    raise RuntimeError("no convex value function was found")


def value_gradient(x: Tensor) -> Tensor:
    """Return the gradient of `x -> f(x, z*(x))`, by the closed form."""
    lower, upper = (each.means() for each in data())
    z = -torch.linalg.solve(lower["zz"], lower["z"] + lower["xz"].T @ x)
    adjoint = torch.linalg.solve(lower["zz"], upper["zz"] @ z + upper["xz"].T @ x + upper["z"])
    return upper["xx"] @ x + upper["xz"] @ z + upper["x"] - lower["xz"] @ adjoint


class _Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.value


class Run:
    """One method on the problem, counting oracle calls: gradients, Hessian-vector and cross products on a batch.

    Args:
        method: one of METHODS.
        lower_rate: learning rate and step size of the lower problem.
        upper_rate: learning rate of the upper problem.
    """

    def __init__(self, method: str, lower_rate: float, upper_rate: float) -> None:
        self.calls = 0
        make, num_steps = METHODS[method]
        self._algorithm = make(lower_rate)

        def lower_loss(batch: dict[str, Any], *, x: Any, z: Any) -> Tensor:
            # Each is differentiated once: a gradient, or the one inside a second-order product.
            self.calls += 1
            return _value(batch, x(), z())

        def upper_loss(batch: dict[str, Any], *, x: Any, z: Any) -> Tensor:
            self.calls += 1
            return _value(batch, x(), z())

        parts = [slice(start, start + BATCH_SIZE) for start in range(0, NUM_SAMPLES, BATCH_SIZE)]
        streams: list[Any] = [CyclingBatches([level.batch(part) for part in parts]) for level in data()]
        roles = {"x": "x", "z": "z"}
        self._upper = Problem(
            "x", _Point(), upper_loss, roles=roles, stream=streams[1], optimizer=partial(torch.optim.SGD, lr=upper_rate)
        )
        lower = Problem(
            "z",
            _Point(),
            lower_loss,
            roles=roles,
            stream=streams[0],
            optimizer=partial(torch.optim.SGD, lr=lower_rate),
            hypergradient=self._algorithm,
            unroll_steps=num_steps,
        )
        graph = Graph(upper_to_lower={"x": ["z"]}, lower_to_upper={"z": ["x"]})
        self._schedule = Schedule(Program([self._upper, lower], graph))

    def cycle(self) -> None:
        """Take the lower steps and an upper one."""
        for _ in range(self._schedule.cycle_length()):
            self._schedule.tick()
        algorithm = self._algorithm
        if isinstance(algorithm, Implicit):
            self.calls += self._schedule.program.internals.algorithm_state("z").last.num_products + 1
        elif isinstance(algorithm, SABA):
            self.calls += 2
        elif isinstance(algorithm, Unrolled):
            self.calls += 2 * NUM_STEPS

    def norm(self) -> float:
        """Return the norm of the value function's gradient."""
        return float(value_gradient(self._upper.module.value.detach()).norm())


METHODS: dict[str, tuple[Any, int]] = {
    "SOBA": (lambda rate: Implicit(FixedPoint(1, rate), warm_start=True), 1),
    "SABA": (lambda rate: SABA(rate, key="number"), 1),
    "F2SA": (lambda rate: Penalty(multiplier=10.0, num_steps=1, step_size=rate), 1),
    "BOME": (lambda rate: Penalty(rule="barrier", barrier=0.1, num_steps=NUM_STEPS, step_size=rate), 1),
    "Identity": (lambda rate: Implicit(Identity()), 1),
    "Neumann 10": (lambda rate: Implicit(Neumann(10, rate)), NUM_STEPS),
    "CG 10": (lambda rate: Implicit(ConjugateGradient(10, 1e-10)), NUM_STEPS),
    "fixed point, warm": (lambda rate: Implicit(FixedPoint(10, rate), warm_start=True), NUM_STEPS),
    "Unrolled 10": (lambda rate: Unrolled(), NUM_STEPS),
}


def measure(folder: Path, budget: int) -> dict[str, Any]:
    """Return each method's curve at its best steps, and draw them.

    Args:
        folder: where the picture goes.
        budget: oracle calls of each run, in epochs of the lower samples (16 batches).
    """
    calls = budget * NUM_SAMPLES // BATCH_SIZE
    rows = []
    for method in METHODS:
        found = [
            {"lower_rate": rate, "upper_rate": rate * ratio, **_curve(method, rate, rate * ratio, calls)}
            for rate, ratio in itertools.product(LOWER_RATES, RATIOS)
        ]
        best = min(found, key=lambda row: row["final"])
        rows.append({"name": method, **best})
        print(
            f"{method}: |value gradient| {best['final']:.2e} (start {best['norm'][0]:.1e}) after {calls} calls, rates "
            f"{best['lower_rate']}, {best['upper_rate']:.2g}",
            flush=True,
        )
    curves = [pictures.Curve(row["name"], [row["calls"]], row["norm"]) for row in rows]
    title = "Stochastic quadratic (after benchmark_bilevel)"
    label = f"oracle calls, each on a batch of {BATCH_SIZE}"
    path = folder / "hypergradients_quadratic.png"
    pictures.draw(path, title, [label], "norm of the value function's gradient", curves, "y")
    return {"calls": calls, "batch_size": BATCH_SIZE, "rows": rows}


def _curve(method: str, lower_rate: float, upper_rate: float, calls: int) -> dict[str, Any]:
    run = Run(method, lower_rate, upper_rate)
    found: dict[str, Any] = {"calls": [0], "norm": [run.norm()]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while run.calls < calls:
            run.cycle()
            if run.calls >= found["calls"][-1] + calls // 100:
                found["calls"].append(run.calls)
                found["norm"].append(run.norm())
                if not math.isfinite(found["norm"][-1]) or found["norm"][-1] > 1e3:
                    break
    tail = found["norm"][-10:]
    # Of a noisy end, the mean of the last tenth.
    found["final"] = sum(tail) / len(tail) if run.calls >= calls else math.inf
    return found


def _value(batch: dict[str, Any], x: Tensor, z: Tensor) -> Tensor:
    squares = 0.5 * ((batch["a"] @ z).square() + (batch["b"] @ x).square())
    return (squares + (batch["p"] @ x) * (batch["r"] @ z) + batch["c"] @ z + batch["d"] @ x).mean()
