"""The tasks in mlotool."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import mlotool.hypergradient as offered
from benchmarks.betty.task import CyclingBatches
from benchmarks.hypergradients.algorithms import (
    BARRIER,
    MULTIPLIER,
    NUM_PAIRS,
    PENALTY_STEPS,
    RADIUS,
    SIGMA,
    Algorithm,
    NotOfferedError,
)
from benchmarks.hypergradients.tasks import Batch, Bilevel
from mlotool.core import stop_gradient
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule

UNROLLED = ("unrolled", "unrolled_kept", "truncated", "evolution")
"""Kinds that look at the lower problem's steps, of which a cycle then takes `num_steps`."""


class Ours:
    """mlotool on a task.

    Args:
        task: the task.
        algorithm: by which hypergradients are computed.
    """

    def __init__(self, task: Bilevel, algorithm: Algorithm) -> None:
        num_steps = task.num_steps if algorithm.kind in UNROLLED else 1
        program = make_program(task, algorithm_of(algorithm.kind, task), algorithm.kind, num_steps)
        self._program, self._schedule = program, Schedule(program)
        lower: Any = task.lower_batches[0]
        if num_steps > 1:
            lower = [lower] * num_steps
        self._batches = {"upper": task.upper_batches[0], "lower": lower}
        self._ticks = self._schedule.cycle_length()

    def hypergradient(self) -> list[Tensor]:
        """Return the total gradient of the upper problem."""
        return list(self._program.gradient("upper", self._batches).values())

    def cycle(self) -> None:
        """Take as many ticks as the upper problem needs for a step."""
        for _ in range(self._ticks):
            self._schedule.tick()


def make_program(
    task: Bilevel, hypergradient: AbstractHypergradient, kind: str, num_steps: int, **lower_settings: Any
) -> Program:
    """Return the two problems.

    Args:
        task: the task.
        hypergradient: of the lower problem.
        kind: of the algorithm.
        num_steps: of the lower problem, between two of the upper one.
        lower_settings: more settings of the lower problem.
    """
    detach = stop_gradient if kind in ("finite_difference_stop", "penalty", "barrier") else Tensor.detach

    def lower_loss(batch: Batch, *, lower: Any, upper: Any) -> Tensor:
        return task.lower_loss(lower, lower.parameters(), upper, batch, detach)

    def upper_loss(batch: Batch, *, lower: Any) -> Tensor:
        return task.upper_loss(lower, batch)

    lower_settings = {"optimizer": partial(torch.optim.SGD, lr=task.learning_rate), **lower_settings}
    problems = [
        Problem(
            "upper",
            task.make_upper(),
            upper_loss,
            roles={"lower": "lower"},
            stream=CyclingBatches(task.upper_batches),  # type: ignore[arg-type]
            optimizer=partial(torch.optim.Adam, lr=1e-3),
        ),
        Problem(
            "lower",
            task.make_lower(),
            lower_loss,
            roles={"lower": "lower", "upper": "upper"},
            stream=CyclingBatches(task.lower_batches),  # type: ignore[arg-type]
            hypergradient=hypergradient,
            unroll_steps=num_steps,
            **lower_settings,
        ),
    ]
    return Program(problems, Graph(upper_to_lower={"upper": ["lower"]}, lower_to_upper={"lower": ["upper"]}))


def algorithm_of(kind: str, task: Bilevel) -> AbstractHypergradient:
    """Return mlotool's algorithm of a kind; whatever it does not export at the time is not offered."""
    rate, count, steps = task.learning_rate, task.num_products, task.num_steps
    # Inverse curvature along the proximal term's directions, or the problem's own step.
    solvers: dict[str, tuple[str, dict[str, Any]]] = {
        "identity": ("Identity", {"step_size": rate}),
        "finite_difference": ("Identity", {}),
        "finite_difference_stop": ("Identity", {}),
        "sama": ("OptimizerPreconditioner", {}),
        "neumann": ("Neumann", {"num_terms": count + 1, "step_size": rate}),
        "fixed_point": ("FixedPoint", {"num_iterations": count + 1, "step_size": rate}),
        "soba": ("FixedPoint", {"num_iterations": 1, "step_size": rate}),
        "cg": ("ConjugateGradient", {"max_iterations": count, "tolerance": 0.0}),
        "normal_cg": ("NormalEquationConjugateGradient", {"max_iterations": count, "tolerance": 0.0}),
        "nystrom": ("Nystrom", {"rank": task.nystrom[0], "rho": task.nystrom[1]}),
        "exact": ("Exact", {}),
        "kfac": ("KFAC", {"damping": task.proximal_weight or 0.01}),
    }
    others: dict[str, tuple[str, dict[str, Any]]] = {
        "unrolled": ("Unrolled", {"remat": True}),
        "unrolled_kept": ("Unrolled", {"remat": False}),
        "truncated": ("Unrolled", {"remat": False, "horizon": (steps + 1) // 2}),
        "penalty": ("Penalty", {"multiplier": MULTIPLIER, "num_steps": PENALTY_STEPS, "step_size": rate}),
        "barrier": (
            "Penalty",
            {"rule": "barrier", "barrier": BARRIER, "num_steps": PENALTY_STEPS, "step_size": rate},
        ),
        "saba": ("SABA", {"step_size": rate, "key": "number"}),
        "evolution": ("EvolutionStrategies", {"num_pairs": NUM_PAIRS, "sigma": SIGMA}),
    }
    if kind == "kfac" and not task.has_cycle:
        raise NotOfferedError("not this loss: KFAC knows cross entropy over classes and squared errors")
    if kind == "first_order":
        raise NotOfferedError("the control: these upper losses have no direct part, so no gradient is left")
    if kind == "exact" and task.has_cycle:
        raise NotOfferedError("too many parameters for a dense matrix")
    name, settings = solvers.get(kind) or others[kind]
    target = getattr(offered, name, None)
    if target is None:
        raise NotOfferedError(f"mlotool exports no {name}")
    if kind in others:
        return target(**settings)
    is_difference = kind in ("finite_difference", "finite_difference_stop", "sama")
    return offered.Implicit(
        target(**settings),
        "finite_difference" if is_difference else "reverse",
        radius=RADIUS if is_difference else None,
        warm_start=kind == "soba",
    )
