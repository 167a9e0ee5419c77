"""The total gradient of one problem, compiled once: its loss at leaves, then the pullbacks of the solutions below it.

    dC_k/dtheta_k = partial C_k/partial theta_k + sum over solutions l of (dtheta*_l/dtheta_k)^T cotangent of theta*_l

Solutions enter the loss as leaves. Once autograd has given their cotangents, the pullbacks are called in reverse order,
each once: what one of them finds for another solution is added to that one's cotangent. What a training step follows is
the mean of this over ranks (`Differentiated`), or what takes its place: `Estimated`, `LayerParallel`, `Sharded`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlotool.core.gradient import Recording, dense, full_precision, gradient_of
from mlotool.core.loss_output import LossOutput
from mlotool.core.tracing import is_tracing
from mlotool.problem.arguments import without_gradient
from mlotool.problem.batches import Share
from mlotool.problem.interface import AbstractZerothOrder, Particle, Pullback, Vector
from mlotool.problem.parallel import AbstractParallel
from mlotool.problem.shards import runs_in_part
from mlotool.program.loss_plan import NOW, Moment, Values
from mlotool.program.solution_plan import Engine, SolutionPlan

Gradient = list[Tensor | None]
"""One tensor a parameter; None where nothing depends on it."""


@dataclass(frozen=True)
class _SolutionOfPlan:
    """One solution of the plan.

    Args:
        solution: its plan.
        wanted: which of its inputs' tensors want a cotangent.
        targets: by input that wants cotangents, its number and how many tensors it has.
    """

    solution: SolutionPlan
    wanted: tuple[bool, ...]
    targets: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Evaluated:
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
        self.problem = engine.problems[number]
        self._number = number
        self._engine = engine
        self._loss = engine.losses[number]
        self._steps: list[_SolutionOfPlan] = []
        carrying = {number}
        for solution in engine.solutions[number]:
            flags: list[bool] = []
            targets = []
            for other, is_constant, _ in solution.inputs:
                count = len(engine.problems[other].own)
                is_wanted = other in carrying and not is_constant
                flags += [is_wanted] * count
                if is_wanted:
                    targets.append((other, count))
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
        constants = values[self._number]
        # The parameters themselves, or others in their place.
        values[self._number] = (
            self.problem.own if constants is None else [tensor.detach().requires_grad_() for tensor in constants]
        )

        def direct(given: Values) -> Tensor:
            return self._loss(given, batch).loss

        evaluated: list[_Evaluated] = []
        for step in self._steps:
            solution = step.solution
            if not step.targets and not solution.is_simulated(moment):
                continue
            inputs = solution.flat_inputs(values)
            pullback = solution.algorithm.pullback(solution.view(values, inputs, moment, direct), inputs)
            if pullback is not None:
                leaves = [tensor.detach().requires_grad_() for tensor in pullback.outputs]
                values[solution.number] = leaves
                evaluated.append(_Evaluated(step, inputs, pullback, leaves))
        return values, evaluated

    def _swept(self, loss: Tensor, values: Values, solutions: Sequence[_Evaluated]) -> Gradient:
        problem, theta, scale = self.problem, values[self._number], self.problem.loss_scale
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
        cotangents: dict[int, Gradient] = {self._number: slopes[:begin]}
        for solution in solutions:
            end = begin + len(solution.leaves)
            cotangents[solution.step.solution.number] = slopes[begin:end]
            begin = end
        del slopes
        with Recording(False):
            for solution in reversed(solutions):
                self._pull_back(solution, cotangents)
        return cotangents[self._number]

    def _pull_back(self, solution: _Evaluated, cotangents: dict[int, Gradient]) -> None:
        """Add what a pullback finds to the other cotangents; nothing reads the solution's own after it."""
        step, outputs = solution.step, solution.pullback.outputs
        own = cotangents.pop(step.solution.number)
        if not step.targets or all(part is None for part in own):
            return
        whole = [torch.zeros_like(x) if part is None else part for x, part in zip(outputs, own, strict=True)]
        cotangent = self._engine.rank_mean.mean(whole)
        del own, whole
        pulled = solution.pullback.first_order(outputs, solution.inputs, step.wanted, cotangent)
        begin = 0
        for number, count in step.targets:
            parts = pulled[begin : begin + count]
            cotangents[number] = [b if a is None else a + b for a, b in zip(cotangents[number], parts, strict=True)]
            begin += count


class AbstractGradient(ABC):
    """What a problem's own training step follows: its loss, and the mean over ranks of its total gradient."""

    @abstractmethod
    def __call__(self, batch: Any, moment: Moment = NOW, *, live: bool = True) -> tuple[LossOutput | None, Gradient]:
        """Return the loss, of a training step in any case, and the gradient. Arguments as for `GradientPlan`."""


class Differentiated(AbstractGradient):
    """By autograd and pullbacks."""

    def __init__(self, number: int, engine: Engine) -> None:
        self.plan = GradientPlan(number, engine)
        self._problem, self._ranks = engine.problems[number], engine.rank_mean
        self._runs_in_part = runs_in_part(self._problem.module)

    def __call__(self, batch: Any, moment: Moment = NOW, *, live: bool = True) -> tuple[LossOutput, Gradient]:
        """Return loss and gradient."""
        output, gradient = self.plan(batch, moment, live=live)
        if self._runs_in_part:
            return output, self._ranks.gradient_of_users(gradient, self._problem.own, Share.opened(batch)[1])
        return output, self._ranks.gradient(gradient, self._problem.own)


class Estimated(AbstractGradient):
    """From values of the loss, which are means over ranks."""

    def __init__(self, number: int, engine: Engine, algorithm: AbstractZerothOrder) -> None:
        self._number, self._engine, self._algorithm = number, engine, algorithm
        self._loss, self._problem = engine.losses[number], engine.problems[number]
        # All problems below have the same settings; what they keep together is the first one's.
        self._memory = engine.memories[engine.solutions[number][0].number]
        # A lower solution that the tasks share lets one task's loss depend on another one's parameters.
        is_separable = all(plan.problem.settings.tasks is not None for plan in engine.solutions[number])
        self._num_tasks = self._problem.settings.tasks if is_separable else None

    def __call__(self, batch: Any, moment: Moment = NOW, *, live: bool = True) -> tuple[LossOutput | None, Gradient]:
        """Return loss and estimate."""
        engine, number = self._engine, self._number
        output = self._loss(engine.own(number), batch, live=True) if live else None

        def loss(theta: Vector, particle: Particle | None) -> Tensor:
            values = engine.nothing()
            values[number] = theta
            with torch.no_grad(), full_precision():
                for plan in engine.solutions[number]:
                    plan.roll_out(values, moment, particle)
                value = self._loss(values, batch).loss if self._num_tasks is None else self._loss.by_task(values, batch)
            # Here and not of the result: the algorithm may rank the values.
            return engine.rank_mean.mean([value])[0]

        devices = tuple({device for problem in engine.problems for device in problem.devices})
        theta, name = self._problem.current(), self._problem.name
        estimate = self._algorithm.gradient(
            loss, theta, self._memory, devices=devices, num_tasks=self._num_tasks, reader=name
        )
        return output, [*estimate]


class LayerParallel(AbstractGradient):
    """By layer-parallel steps; where nothing is to move, as one serial pass."""

    def __init__(self, number: int, engine: Engine, parallel: AbstractParallel) -> None:
        self._serial = Differentiated(number, engine)
        self._number, self._engine, self._parallel = number, engine, parallel

    def __call__(self, batch: Any, moment: Moment = NOW, *, live: bool = True) -> tuple[LossOutput, Gradient]:
        """Return the loss, and what the problem steps along."""
        if not live:
            return self._serial(batch, moment, live=False)
        engine, parallel, number = self._engine, self._parallel, self._number
        own, loss, values = engine.problems[number].own, engine.losses[number], engine.own(number)

        def direct(given: Values) -> Tensor:
            return loss(given, batch).loss

        parallel.begin(*Share.opened(batch))
        for plan in engine.solutions[number]:
            plan.add(values, moment, direct)
        output = parallel.evaluate(lambda: loss(values, batch, live=True))
        direction = parallel.gradient(output.loss, own)
        return output, [*direction] if parallel.is_divided else engine.rank_mean.gradient(direction, own)


class Sharded(AbstractGradient):
    """Of this rank's part of the parameters, while they are divided; gradients pass through no solution."""

    def __init__(self, number: int, engine: Engine) -> None:
        # Where the parameters are whole: on one rank, and after the training.
        self._whole = Differentiated(number, engine)
        self._number, self._engine, self._problem = number, engine, engine.problems[number]

    def __call__(self, batch: Any, moment: Moment = NOW, *, live: bool = True) -> tuple[LossOutput, Gradient]:
        """Return loss and gradient."""
        shards = self._problem.shards
        if shards is None:
            return self._whole(batch, moment, live=live)
        output = self._engine.losses[self._number](self._engine.own(self._number), batch, live=live)
        return output, shards.gradient(output.loss, self._problem.theta, Share.opened(batch)[1])


def training_gradient_of(number: int, engine: Engine, zeroth_order: AbstractZerothOrder | None) -> AbstractGradient:
    """Return how the total gradient of a problem is taken.

    Args:
        number: of the problem.
        engine: of the program.
        zeroth_order: what estimates it; None where it is differentiated.
    """
    problem = engine.problems[number]
    if zeroth_order is not None:
        return Estimated(number, engine, zeroth_order)
    if problem.parallel is not None:
        return LayerParallel(number, engine, problem.parallel)
    return Sharded(number, engine) if problem.settings.shard else Differentiated(number, engine)


def averaged(
    found: Iterable[tuple[LossOutput, Sequence[Tensor | None]]],
) -> tuple[LossOutput, list[Tensor | None]]:
    """Return the mean loss and gradient over batches, which are taken one at a time.

    Args:
        found: a loss and its gradient for each batch, at least one.
    """
    outputs: list[LossOutput] = []
    total: list[Tensor | None] = []
    for output, gradient in found:
        outputs.append(output)
        total = [*gradient] if len(outputs) == 1 else [_add(a, b) for a, b in zip(total, gradient, strict=True)]
    if len(outputs) == 1:
        return outputs[0], total
    return LossOutput.mean(outputs), [None if tensor is None else tensor / len(outputs) for tensor in total]


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
