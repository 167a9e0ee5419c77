"""When each problem steps."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.core.replay import RandomState
from mlotool.core.user_code import Call, is_of_user, note, passed_through
from mlotool.problem.mean_gradient import mean_gradient
from mlotool.problem.problem import Evaluate, Problem
from mlotool.problem.trajectory import StepGraph
from mlotool.problem.update import Settings
from mlotool.problem.usable import check_used
from mlotool.program.program import Program
from mlotool.program.step_rates import ticks_per_step

_Numbered = tuple[Any, int | None]
"""A batch, and its position in the stream where every epoch has the same batches."""


@dataclass(slots=True)
class StepResult:
    """What one step of a problem yields to log.

    Args:
        loss: 0-D, detached; the mean over accumulated batches, and over tasks.
        metrics: 0-D tensors by name, detached; `gradient_norm` where the gradient is clipped, before it is;
            `hypergradient_norm`, of the total gradient, before clipping too, where it passes through solutions and the
            schedule is asked for it.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class Schedule:
    """Steps the problems of a program: every leaf once a tick, and whatever that completes.

    A problem above is due once each problem that it reads has taken its `unroll_steps` since the last time; one
    that has finished goes on stepping while it waits. Problems that are due at the same moment all compute their
    gradients before any of them steps, so the order of declaration does not matter.

    Args:
        program: the problems and their graph; every problem needs an optimizer.
        with_norms: results have the norms of hypergradients, for a log; they cost 1 % of a cycle of small networks.

    Example:
        Two steps of `classifier` for one of `reweight`, with `unroll_steps=2` on `classifier`::

            schedule = Schedule(program)
            for _ in range(100):
                results = schedule.tick()
    """

    def __init__(self, program: Program, *, with_norms: bool = False) -> None:
        advice = "Write Schedule(Program(problems, graph))."
        require(isinstance(program, Program), "Schedule.program", program, "a Program", advice)
        for name, problem in program.problems.items():
            if problem.optimizer is None:
                raise ConfigError(
                    f"problems.{name}.optimizer: nothing is set; expected an optimizer. "
                    f"Write problems.{name}.optimizer: {{_target_: torch.optim.SGD, lr: 0.1}}."
                )
        self.program = program
        self.num_ticks = 0
        self._with_norms = with_norms
        graph = program.graph
        self._leaves = graph.leaves(program.problems)
        self._lowers = {name: graph.lowers(name) for name in program.problems if graph.lowers(name)}
        self._shaped = graph.upper_to_lower
        self._readers = {name: tuple(graph.readers(name)) for name in program.problems}
        self._waited = {(upper, lower): 0 for upper, lowers in self._lowers.items() for lower in lowers}
        self._snapshots: dict[str, dict[str, Any]] = {}
        # Problems whose next step begins an unroll.
        self._at_start = set(program.problems)

    def tick(self) -> dict[str, StepResult]:
        """Step every leaf problem and all that this completes.

        Returns:
            By name, the result of each problem that has stepped.
        """
        results: dict[str, StepResult] = {}
        due = self._leaves
        while due:
            results.update(self._step_together(due))
            self._count(due)
            if self._snapshots:
                results.update(self._roll_back(due))
            due = tuple(name for name in self._lowers if name not in results and self._is_due(name))
        self.num_ticks += 1
        return results

    def cycle_length(self) -> int:
        """Return the ticks after which, warm-up aside, every problem has stepped at least once."""
        settings = {name: problem.settings for name, problem in self.program.problems.items()}
        return max(ticks_per_step(settings, self.program.graph).values())

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and look-ahead snapshots, in plain containers."""
        return {
            "num_ticks": self.num_ticks,
            "waited": [[upper, lower, steps] for (upper, lower), steps in self._waited.items()],
            "snapshots": dict(self._snapshots),
            "at_start": [name for name in self.program.problems if name in self._at_start],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state back."""
        keys = ("num_ticks", "waited", "snapshots", "at_start")
        is_right = isinstance(state, Mapping) and all(each in state for each in keys)
        require(is_right, "state", state, "what a schedule's state_dict() has returned", "Give that.")
        self.num_ticks = state["num_ticks"]
        self._waited = {(upper, lower): steps for upper, lower, steps in state["waited"]}
        self._snapshots = dict(state["snapshots"])
        self._at_start = set(state["at_start"])

    def _step_together(self, names: Iterable[str]) -> dict[str, StepResult]:
        problems = [self.program.problems[name] for name in names]
        for problem in problems:
            if self._looks_ahead(problem) and problem.name not in self._snapshots:
                self._snapshots[problem.name] = problem.snapshot()
            # The first step that counts begins an unroll; those of the warm-up belong to none.
            is_counted = problem.num_steps > problem.settings.warmup_steps
            if not is_counted or problem.name in self._at_start:
                problem.trajectory.clear()
            if problem.settings.reset_to is not None and problem.name in self._at_start:
                problem.reset(self.program.start(problem.name))
        self._at_start.difference_update(names)
        # All gradients, and all hyperparameters that other problems give, are those before any of these steps.
        steps = [self._prepared(problem, self._next_batches(problem)) for problem in problems]
        # A line search evaluates its loss again, and sees the other problems as they were if it goes first.
        steps.sort(key=lambda step: not step.problem.evaluates_again)
        return {step.problem.name: step.take() for step in steps}

    def _prepared(self, problem: Problem, batches: Iterable[_Numbered]) -> "_Step":
        """Return a step that is yet to be taken."""
        random = RandomState(problem.devices) if problem.evaluates_again else None
        try:
            output, gradient = self._gradient(problem, batches)
        except Exception as error:
            note(error, lambda: self._gradient_call(problem.name))
            if "uninitialized parameter" in str(error):
                check_used(problem.name, problem.module)
            raise
        evaluate = None if random is None else self._evaluate(problem, output, gradient, random)
        # Ranks that hold parts of a problem would each see the norm of their own.
        is_whole = problem.shards is None and problem.parallel is None
        with_norm = self._with_norms and is_whole and bool(self.program.solutions_read_by(problem.name))
        settings = self.program.settings(problem.name) if problem.settings.optimizer_roles else None
        return _Step(problem, output, gradient, settings, evaluate, with_norm)

    def _gradient_call(self, name: str) -> Call:
        problems = self.program.problems
        code = [part for each in problems.values() for part in (each.loss, *each.module.modules())]
        return Call(f"problems.{name}", "its gradient", is_foreign=is_of_user(*code))

    def _evaluate(
        self, problem: Problem, output: LossOutput, gradient: list[Tensor | None], random: RandomState
    ) -> Evaluate:
        """Return what evaluates the step's loss at other parameters: same batches, same random numbers."""
        first = [(output, gradient)]

        def evaluate() -> tuple[Tensor, list[Tensor | None]]:
            if first:
                output, gradient = first.pop()
            else:
                with random.replayed():
                    output, gradient = self._gradient(problem, _recent_batches(problem))
            # All ranks search alike, since they decide on means.
            return self.program.reduce([output.loss.detach()])[0], gradient

        return evaluate

    def _looks_ahead(self, problem: Problem) -> bool:
        # Warm-up steps are real: no upper step follows that could take them back.
        is_warm = problem.num_steps >= problem.settings.warmup_steps
        return problem.settings.roll_back and is_warm and bool(self._readers[problem.name])

    def _next_batches(self, problem: Problem) -> Iterator[_Numbered]:
        for _ in range(problem.settings.accumulate_batches):
            batch = None if problem.stream is None else problem.stream.next()
            yield batch, _last_number(problem)

    def _gradient(self, problem: Problem, batches: Iterable[_Numbered]) -> tuple[LossOutput, list[Tensor | None]]:
        """Return the mean direction over `batches`, which are drawn one at a time."""
        algorithm = problem.hypergradient
        keeps_graphs = algorithm is not None and algorithm.keeps_graphs and problem.trajectory.is_kept
        if keeps_graphs and not self.program.makes_solutions(problem.name):
            return self._kept_gradient(problem, batches)
        outputs, total = [], None
        is_recorded, drawn, randoms = problem.trajectory.is_kept, [], []
        for batch, number in batches:
            if is_recorded:
                drawn.append(batch)
                randoms.append(RandomState(problem.devices))
            output, gradient = self._direction_on(problem, batch, number)
            outputs.append(output)
            total = gradient if total is None else [_add(a, b) for a, b in zip(total, gradient, strict=True)]
        assert total is not None
        if is_recorded:
            self.program.record(problem.name, drawn, randoms)
        if len(outputs) == 1:
            return outputs[0], total
        return LossOutput.mean(outputs), [None if tensor is None else tensor / len(outputs) for tensor in total]

    def _kept_gradient(self, problem: Problem, batches: Iterable[_Numbered]) -> tuple[LossOutput, list[Tensor | None]]:
        """Return the same, and keep the graph of the gradient in the record of the step."""
        name, leaves = problem.name, self.program.leaves(problem.name)
        outputs, slopes, drawn, randoms = [], [], [], []
        for batch, _ in batches:
            drawn.append(batch)
            randoms.append(RandomState(problem.devices))
            output, slope = self.program.kept_gradient(name, batch, leaves)
            outputs.append(output)
            slopes.append(slope)
        theta, *inputs = leaves.values()
        found, mean = mean_gradient(slopes, theta, self.program.reduce)
        graph = StepGraph(theta, [tensor for tensors in inputs for tensor in tensors], found, mean)
        self.program.record(name, drawn, randoms, graph)
        output = outputs[0] if len(outputs) == 1 else LossOutput.mean(outputs)
        return output, [None if each is None else each.detach() for each in mean]

    def _direction_on(self, problem: Problem, batch: Any, number: int | None) -> tuple[LossOutput, list[Tensor | None]]:
        return self.program.training_gradient(problem.name, batch, number)

    def _count(self, stepped: Iterable[str]) -> None:
        problems = self.program.problems
        for name in stepped:
            for lower in self._lowers.get(name, ()):
                self._waited[name, lower] = 0
                self._begin_unroll(lower)
            for lower in self._shaped.get(name, ()):
                self._begin_unroll(lower)
            if problems[name].num_steps > problems[name].settings.warmup_steps:
                for upper in self._readers[name]:
                    self._waited[upper, name] += 1

    def _begin_unroll(self, name: str) -> None:
        # What shapes the problem has moved, or its solution has been read. A problem further above may still have to
        # differentiate the steps, so they are forgotten at the next one.
        self._at_start.add(name)

    def _is_due(self, name: str) -> bool:
        problems = self.program.problems
        return all(self._waited[name, lower] >= problems[lower].settings.unroll_steps for lower in self._lowers[name])

    def _roll_back(self, stepped: Iterable[str]) -> dict[str, StepResult]:
        """Return the look-ahead problems below `stepped` to where they were, and let each take one real step."""
        lowers = {lower: None for name in stepped for lower in self._lowers.get(name, ()) if lower in self._snapshots}
        problems = [self.program.problems[lower] for lower in lowers]
        for problem in problems:
            problem.restore(self._snapshots.pop(problem.name))
        for problem in problems:
            problem.trajectory.clear()
        steps = [self._prepared(problem, _recent_batches(problem)) for problem in problems]
        for problem in problems:
            # The real step leads to where the next look-ahead begins.
            self._begin_unroll(problem.name)
        return {step.problem.name: step.take() for step in steps}


@dataclass(slots=True)
class _Step:
    """An optimizer step that is yet to be taken, and whether the norm of its gradient is to be reported."""

    problem: Problem
    output: LossOutput
    gradient: list[Tensor | None]
    settings: tuple[Settings, ...] | None
    evaluate: Evaluate | None
    with_norm: bool = False

    def take(self) -> StepResult:
        """Take it."""
        hypergradient_norm = _norm(self.problem, self.gradient) if self.with_norm else None
        try:
            norm = self.problem.step(self.gradient, self.settings, self.evaluate)
        except Exception as error:
            # torch's optimizers refuse gradients and rates that code of the user's has made.
            is_sparse = any(each is not None and each.is_sparse for each in self.gradient)
            is_foreign = is_sparse or passed_through(error, "/torch/optim/") or is_of_user(self.problem.optimizer)
            note(error, lambda: Call(f"problems.{self.problem.name}", "its step", is_foreign=is_foreign))
            raise
        try:
            return _result(self.problem, self.output, norm, hypergradient_norm)
        except Exception as error:
            note(error, lambda: Call(f"problems.{self.problem.name}.loss", self.problem.loss))
            raise


def _last_number(problem: Problem) -> int | None:
    return 0 if problem.stream is None else getattr(problem.stream, "last_number", None)


def _recent_batches(problem: Problem) -> list[_Numbered]:
    stream, count = problem.stream, problem.settings.accumulate_batches
    if stream is None:
        return [(None, 0)]
    batches = stream.recent(count)
    numbers = stream.recent_numbers(count) if hasattr(stream, "recent_numbers") else [None] * len(batches)
    return list(zip(batches, numbers, strict=True))


def _norm(problem: Problem, gradient: list[Tensor | None]) -> Tensor | None:
    """Return the norm of a gradient, of which nothing is read from the device; None of an overflow in fp16."""
    tensors = [tensor for tensor in gradient if tensor is not None]
    if not tensors:
        return None
    norms = torch._foreach_norm(tensors)
    norm = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    norm = norm.detach()
    return norm if problem.loss_scale is None or math.isfinite(norm) else None


def _result(
    problem: Problem, output: LossOutput, norm: Tensor | None, hypergradient_norm: Tensor | None = None
) -> StepResult:
    metrics = {name: value.detach() for name, value in output.metrics.items()}
    if norm is not None:
        metrics["gradient_norm"] = norm.detach()
    if hypergradient_norm is not None:
        metrics["hypergradient_norm"] = hypergradient_norm
    loss = output.loss.detach()
    return StepResult(loss if problem.settings.tasks is None else loss / problem.settings.tasks, metrics)


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
