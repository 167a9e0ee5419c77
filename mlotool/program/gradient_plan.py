"""The total gradient of one problem: its loss at leaves, then the pullbacks of the solutions below it; a step along it.

    dC_k/dtheta_k = partial C_k/partial theta_k + sum over solutions l of (dtheta*_l/dtheta_k)^T cotangent of theta*_l

Solutions enter the loss as leaves. Once autograd has given their cotangents, the pullbacks are called in reverse order,
each once: what one of them finds for another solution is added to that one's cotangent. What a training step follows is
the mean of this over ranks, or what takes its place (`training_gradient_of`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlotool.core.gradient import dense, full_precision, gradient_of
from mlotool.core.loss_output import LossOutput
from mlotool.core.tracing import is_tracing
from mlotool.core.user_code import Call, is_of_user, note, passed_through
from mlotool.problem.arguments import without_gradient
from mlotool.problem.interface import AbstractZerothOrder, Particle, Pullback, Vector
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.problem import Evaluate, Problem
from mlotool.problem.shards import runs_in_part
from mlotool.problem.streams.batches import Share
from mlotool.program.solution_plan import Engine, Moment, SolutionPlan, Values

# One tensor per parameter; None where nothing depends on it.
Gradient = list[Tensor | None]


class _SolutionOfPlan(NamedTuple):
    """One solution of the plan.

    Args:
        solution: its plan.
        wanted: which of its inputs' tensors want a cotangent.
        targets: by input that wants cotangents, its number and how many tensors it has.
    """

    solution: SolutionPlan
    wanted: tuple[bool, ...]
    targets: tuple[tuple[int, int], ...]


class _Evaluated(NamedTuple):
    """A solution in one evaluation of the gradient: its pullback, and the leaves that stand for it in the loss."""

    step: _SolutionOfPlan
    inputs: list[Tensor]
    pullback: Pullback
    leaves: list[Tensor]


class GradientPlan:
    """Takes the total gradient of one problem.

    Args:
        number: of the problem.
        engine: of the program, whose solutions are at hand.
    """

    def __init__(self, number: int, engine: Engine) -> None:
        self.problem, self.number = engine.problems[number], number
        self._engine, self._loss = engine, engine.losses[number]
        self._steps: list[_SolutionOfPlan] = []
        carrying = {number}
        for solution in engine.solutions[number]:
            flags: list[bool] = []
            targets = []
            for other, is_constant, part in solution.inputs:
                is_wanted, count = other in carrying and not is_constant, part.stop - part.start
                flags += [is_wanted] * count
                targets += [(other, count)] if is_wanted else []
            if targets and not solution.algorithm.is_constant:
                carrying.add(solution.number)
            self._steps.append(_SolutionOfPlan(solution, tuple(flags), tuple(targets)))

    def __call__(self, batch: Any, moment: Moment, *, live: bool) -> tuple[LossOutput, Gradient]:
        """Return this rank's loss and gradient.

        Args:
            batch: of the problem.
            moment: batches, earlier snapshots and parameters that take the place of the current ones.
            live: whether they are those of a training step, in which the problem's own buffers move.
        """
        values, solutions = self._with_solutions(batch, moment)
        output = self._loss(values, batch, live=live)
        return output, self._swept(output.loss, values, solutions)

    def _with_solutions(self, batch: Any, moment: Moment) -> tuple[Values, list[_Evaluated]]:
        values = moment.values(len(self._engine.problems))
        constants = values[self.number]
        # The parameters themselves, or others in their place.
        values[self.number] = (
            self.problem.own if constants is None else [tensor.detach().requires_grad_() for tensor in constants]
        )
        evaluated: list[_Evaluated] = []
        for step in self._steps:
            solution = step.solution
            if not step.targets and not solution.is_simulated(moment):
                continue
            inputs = solution.flat_inputs(values)
            view = solution.view(values, inputs, moment, lambda given: self._loss(given, batch).loss)
            pullback = solution.algorithm.pullback(view, inputs)
            if pullback is not None:
                leaves = [tensor.detach().requires_grad_() for tensor in pullback.outputs]
                values[solution.number] = leaves
                evaluated.append(_Evaluated(step, inputs, pullback, leaves))
        return values, evaluated

    def _swept(self, loss: Tensor, values: Values, solutions: Sequence[_Evaluated]) -> Gradient:
        problem, theta, scale = self.problem, values[self.number], self.problem.optimizer_step.loss_scale
        assert theta is not None
        if not loss.requires_grad:
            raise without_gradient(problem.name)
        sources: list[Tensor] = [*theta]
        for solution in solutions:
            sources += solution.leaves
        slopes: Gradient = gradient_of(loss if scale is None else loss * scale.value, sources, keeps_sparse=True)
        if True in [slope is not None and slope.is_sparse for slope in slopes]:
            is_kept = problem.optimizer_step.takes_sparse and not solutions and self._engine.rank_mean.is_alone
            slopes = slopes if is_kept and not is_tracing() else [*dense(slopes)]
        if scale is not None:
            # A pullback sees its cotangents without the factor.
            slopes = scale.unscaled(slopes)
        if not solutions:
            if not self._steps and all(slope is None for slope in slopes):
                # Of an evaluation before: what a loss or a module has kept.
                raise without_gradient(problem.name)
            return slopes
        begin = len(theta)
        cotangents: dict[int, Gradient] = {self.number: slopes[:begin]}
        for solution in solutions:
            end = begin + len(solution.leaves)
            cotangents[solution.step.solution.number] = slopes[begin:end]
            begin = end
        del slopes
        with torch.no_grad():
            for solution in reversed(solutions):
                self._pull_back(solution, cotangents)
        return cotangents[self.number]

    def _pull_back(self, solution: _Evaluated, cotangents: dict[int, Gradient]) -> None:
        """Add what a pullback finds to the other cotangents; nothing reads the solution's own after it."""
        step, outputs = solution.step, solution.pullback.outputs
        own = cotangents.pop(step.solution.number)
        if not step.targets or all(part is None for part in own):
            return
        whole = [torch.zeros_like(x) if part is None else part for x, part in zip(outputs, own, strict=True)]
        cotangent = self._engine.means[step.solution.number].mean(whole)
        del own, whole
        pulled = solution.pullback.first_order(outputs, solution.inputs, step.wanted, cotangent)
        begin = 0
        for number, count in step.targets:
            parts = pulled[begin : begin + count]
            cotangents[number] = [b if a is None else a + b for a, b in zip(cotangents[number], parts, strict=True)]
            begin += count


# `(batch, moment, whether the problem's own buffers move) -> (loss, mean over ranks of the total gradient)`.
# What a problem's own training step follows; a training step has a loss in any case. Arguments as for `GradientPlan`.
TrainingGradient = Callable[[Any, Moment, bool], tuple[LossOutput | None, Gradient]]


def training_gradient_of(
    plan: GradientPlan, engine: Engine, zeroth_order: AbstractZerothOrder | None
) -> TrainingGradient:
    """Return how the total gradient of a problem is taken: a partial function, which a copy of a program copies too.

    Args:
        plan: of the gradient by autograd and pullbacks.
        engine: of the program.
        zeroth_order: what estimates it; None where it is differentiated.
    """
    if zeroth_order is not None:
        return partial(_estimated, plan.number, engine, zeroth_order)
    differentiated = partial(_differentiated, plan, engine, runs_in_part(plan.problem.module))
    if plan.problem.parallel is not None:
        return partial(_layer_parallel, differentiated, plan.number, engine)
    return partial(_sharded, differentiated, plan.number, engine) if plan.problem.settings.shard else differentiated


def _differentiated(
    plan: GradientPlan, engine: Engine, is_part: bool, batch: Any, moment: Moment, live: bool
) -> tuple[LossOutput, Gradient]:
    """Take it by autograd and pullbacks."""
    output, gradient = plan(batch, moment, live=live)
    if is_part:
        return output, engine.means[plan.number].gradient_of_users(gradient, plan.problem.own, Share.opened(batch)[1])
    return output, engine.means[plan.number].gradient(gradient, plan.problem.own)


def _estimated(
    number: int, engine: Engine, algorithm: AbstractZerothOrder, batch: Any, moment: Moment, live: bool
) -> tuple[LossOutput | None, Gradient]:
    """Estimate it from values of the loss, which are means over ranks."""
    loss, problem, solutions = engine.losses[number], engine.problems[number], engine.solutions[number]
    output = loss(engine.own(number), batch, live=True) if live else None
    # A lower solution that the tasks share lets one task's loss depend on another one's parameters.
    is_separable = all(plan.problem.settings.tasks is not None for plan in solutions)
    num_tasks = problem.num_tasks if is_separable else None

    def value(theta: Vector, particle: Particle | None) -> Tensor:
        values = engine.nothing()
        values[number] = theta
        with torch.no_grad(), full_precision():
            for plan in solutions:
                plan.roll_out(values, moment, particle)
            value = loss(values, batch).loss if num_tasks is None else loss.by_task(values, batch)
        # Here and not of the result: the algorithm may rank the values.
        return engine.means[number].mean([value])[0]

    devices = tuple({device for problem in engine.problems for device in problem.devices})
    # All problems below have the same settings; what they keep together is the first one's.
    theta, memory, name = problem.current(), engine.memories[solutions[0].number], problem.name
    return output, [*algorithm.gradient(value, theta, memory, devices=devices, num_tasks=num_tasks, reader=name)]


def _layer_parallel(
    serial: TrainingGradient, number: int, engine: Engine, batch: Any, moment: Moment, live: bool
) -> tuple[LossOutput | None, Gradient]:
    """Take it by layer-parallel steps; where nothing is to move, as one serial pass."""
    if not live:
        return serial(batch, moment, False)
    loss, own, values = engine.losses[number], engine.problems[number].own, engine.own(number)
    parallel = engine.problems[number].parallel
    assert parallel is not None
    parallel.begin(*Share.opened(batch))
    for solution in engine.solutions[number]:
        solution.add(values, moment, lambda given: loss(given, batch).loss)
    output = parallel.evaluate(lambda: loss(values, batch, live=True))
    direction = parallel.gradient(output.loss, own)
    return output, [*direction] if parallel.is_divided else engine.rank_mean.gradient(direction, own)


def _sharded(
    whole: TrainingGradient, number: int, engine: Engine, batch: Any, moment: Moment, live: bool
) -> tuple[LossOutput | None, Gradient]:
    """Take this rank's part of it, while parameters are divided; gradients pass through no solution."""
    problem = engine.problems[number]
    # Where the parameters are whole: on one rank, and after the training.
    if problem.shards is None:
        return whole(batch, moment, live)
    output = engine.losses[number](engine.own(number), batch, live=live)
    return output, problem.shards.gradient(output.loss, problem.theta, Share.opened(batch)[1])


def averaged(pairs: Iterable[tuple[LossOutput, Sequence[Tensor | None]]]) -> tuple[LossOutput, list[Tensor | None]]:
    """Return the mean loss and gradient over batches, which are taken one at a time.

    Args:
        pairs: a loss and its gradient for each batch, at least one.
    """
    outputs: list[LossOutput] = []
    total: list[Tensor | None] = []
    for output, gradient in pairs:
        outputs.append(output)
        total = [*gradient] if len(outputs) == 1 else [_add(a, b) for a, b in zip(total, gradient, strict=True)]
    if len(outputs) == 1:
        return outputs[0], total
    return LossOutput.mean(outputs), [None if tensor is None else tensor / len(outputs) for tensor in total]


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


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


def norm_of(problem: Problem, gradient: Sequence[Tensor | None]) -> Tensor | None:
    """Return the norm of a gradient, of which nothing is read from the device; None of an overflow in fp16."""
    tensors = [tensor for tensor in gradient if tensor is not None]
    if not tensors:
        return None
    norms = torch._foreach_norm(tensors)
    norm = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    norm = norm.detach()
    return norm if problem.optimizer_step.loss_scale is None or bool(norm.isfinite()) else None


def result_of(
    problem: Problem, output: LossOutput, norm: Tensor | None, hypergradient_norm: Tensor | None = None
) -> StepResult:
    """Return the result of a step.

    Args:
        problem: that has stepped.
        output: its loss.
        norm: of its gradient before clipping; None where it is not clipped.
        hypergradient_norm: of its total gradient; None where it passes through no solution.
    """
    metrics = {name: value.detach() for name, value in output.metrics.items()}
    if norm is not None:
        metrics["gradient_norm"] = norm.detach()
    if hypergradient_norm is not None:
        metrics["hypergradient_norm"] = hypergradient_norm
    loss = output.loss.detach()
    return StepResult(loss if problem.num_tasks is None else loss / problem.num_tasks, metrics)


@dataclass(slots=True)
class PreparedStep:
    """An optimizer step that is yet to be taken.

    Args:
        problem: that steps.
        output: its loss.
        gradient: one tensor per parameter; None where it is unused.
        hyperparameters: those of each parameter, where another problem gives some of them.
        evaluate: for an optimizer that evaluates the loss itself.
        with_norm: whether the norm of the gradient is to be reported.
    """

    problem: Problem
    output: LossOutput
    gradient: list[Tensor | None]
    hyperparameters: tuple[Hyperparameters, ...] | None
    evaluate: Evaluate | None
    with_norm: bool = False

    def take(self) -> StepResult:
        """Take it."""
        hypergradient_norm = norm_of(self.problem, self.gradient) if self.with_norm else None
        norm = stepped(self.problem, self.gradient, self.hyperparameters, self.evaluate)
        try:
            return result_of(self.problem, self.output, norm, hypergradient_norm)
        except Exception as error:
            note(error, lambda: Call(f"problems.{self.problem.name}.loss", self.problem.loss))
            raise


def stepped(
    problem: Problem,
    gradient: list[Tensor | None],
    hyperparameters: Sequence[Hyperparameters] | None = None,
    evaluate: Evaluate | None = None,
) -> Tensor | None:
    """Take an optimizer step; return the gradient's norm before clipping, if it is clipped.

    Args:
        problem: that steps.
        gradient: one tensor per parameter; None where it is unused.
        hyperparameters: those of each parameter, where another problem gives some of them.
        evaluate: for an optimizer that evaluates the loss itself.
    """
    try:
        return problem.step(gradient, hyperparameters, evaluate)
    except Exception as error:
        # torch's optimizers refuse gradients and rates that code of the user's has made.
        is_sparse = any(slope is not None and slope.is_sparse for slope in gradient)
        is_foreign = is_sparse or passed_through(error, "/torch/optim/") or is_of_user(problem.optimizer)
        note(error, lambda: Call(f"problems.{problem.name}", "its step", is_foreign=is_foreign))
        raise
