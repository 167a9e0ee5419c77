"""The total gradient of one problem, compiled once: its loss at leaves, then the pullbacks of the solutions below it.

    dC_k/dtheta_k = partial C_k/partial theta_k + sum over solutions l of (dtheta*_l/dtheta_k)^T cotangent of theta*_l

Solutions enter the loss as leaves. Once autograd has given their cotangents, the pullbacks are called in reverse order,
each once: what one of them finds for another solution is added to that one's cotangent.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlotool.core.gradient import Recording, dense, gradient_of
from mlotool.core.loss_output import LossOutput
from mlotool.core.precision import full_precision
from mlotool.core.tracing import is_tracing
from mlotool.problem.batch_share import Share
from mlotool.problem.interface import Particle, Vector
from mlotool.problem.parallel import AbstractParallel
from mlotool.problem.parts import runs_in_part
from mlotool.problem.problem import Problem
from mlotool.problem.pullback import Connected, Pullback
from mlotool.problem.usable import without_gradient
from mlotool.problem.zeroth_order import AbstractZerothOrder
from mlotool.program.loss_plan import NOW, Moment, Tensors, Values
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
class _Taken:
    """A solution in one evaluation of the gradient: its pullback, and the leaves that stand for it in the loss."""

    step: _SolutionOfPlan
    inputs: list[Tensor]
    pullback: Pullback | Connected
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

    def __call__(self, batch: Any, moment: Moment) -> Gradient:
        """Return this rank's gradient as a pure function: no buffer moves.

        Args:
            batch: of the problem.
            moment: batches, earlier snapshots and parameters that take the place of the current ones.
        """
        values, taken = self._with_solutions(batch, moment)
        return self._swept(self._loss(values, batch).loss, values, taken)

    def live(self, batch: Any, moment: Moment) -> tuple[LossOutput, Gradient]:
        """Return the loss of a training step and its gradient: the problem's own buffers move."""
        values, taken = self._with_solutions(batch, moment)
        output = self._loss.live(values, batch)
        return output, self._swept(output.loss, values, taken)

    def _with_solutions(self, batch: Any, moment: Moment) -> tuple[Values, list[_Taken]]:
        values = moment.values(len(self._engine.problems))
        values[self._number] = _leaves(self.problem, values[self._number])
        taken: list[_Taken] = []
        if not self._steps:
            return values, taken

        def direct(given: Values) -> Tensor:
            return self._loss(given, batch).loss

        for step in self._steps:
            solution = step.solution
            if not step.targets and not solution.is_simulated(moment):
                continue
            inputs = solution.flat_inputs(values)
            pullback = solution.algorithm.pullback(solution.view(values, inputs, moment, direct), inputs)
            if pullback is not None:
                leaves = [tensor.detach().requires_grad_() for tensor in pullback.outputs]
                values[solution.number] = leaves
                taken.append(_Taken(step, inputs, pullback, leaves))
        return values, taken

    def _swept(self, loss: Tensor, values: Values, taken: Sequence[_Taken]) -> Gradient:
        problem, theta, scale = self.problem, values[self._number], self.problem.loss_scale
        assert theta is not None
        if not loss.requires_grad:
            raise without_gradient(problem.name)
        sources: list[Tensor] = [*theta]
        for each in taken:
            sources += each.leaves
        scaled = loss if scale is None else loss * scale.value
        found: Gradient = gradient_of(scaled, sources, keeps_sparse=True)
        if True in [each is not None and each.is_sparse for each in found]:
            is_kept = problem.optimizer_step.takes_sparse and not taken and self._engine.rank_mean.is_alone
            found = found if is_kept and not is_tracing() else [*dense(found)]
        if scale is not None:
            # A pullback sees its cotangents without the factor.
            found = scale.unscaled(found)
        if not taken:
            if not self._steps and all(each is None for each in found):
                # Of an evaluation before: what a loss or a module has kept.
                raise without_gradient(problem.name)
            return found
        begin = len(theta)
        cotangents: dict[int, Gradient] = {self._number: found[:begin]}
        for each in taken:
            end = begin + len(each.leaves)
            cotangents[each.step.solution.number] = found[begin:end]
            begin = end
        del found
        with Recording(False):
            for each in reversed(taken):
                self._pull_back(each, cotangents)
        return cotangents[self._number]

    def _pull_back(self, taken: _Taken, cotangents: dict[int, Gradient]) -> None:
        step = taken.step
        cotangent = self._cotangent(taken, cotangents)
        if cotangent is None:
            return
        found = taken.pullback.first_order(taken.pullback.outputs, taken.inputs, step.wanted, cotangent)
        begin = 0
        for number, count in step.targets:
            before = cotangents[number]
            parts = found[begin : begin + count]
            cotangents[number] = [b if a is None else a + b for a, b in zip(before, parts, strict=True)]
            begin += count

    def _cotangent(self, taken: _Taken, cotangents: dict[int, Gradient]) -> list[Tensor] | None:
        """Take the cotangent of a solution, which nothing reads after its pullback, out of the others."""
        found = cotangents.pop(taken.step.solution.number)
        if not taken.step.targets or all(each is None for each in found):
            return None
        pairs = zip(taken.pullback.outputs, found, strict=True)
        return self._engine.rank_mean.mean([torch.zeros_like(x) if v is None else v for x, v in pairs])


def _leaves(problem: Problem, constants: Tensors | None) -> Tensors:
    """Return what the gradient is taken with respect to: the parameters themselves, or others in their place."""
    return problem.own if constants is None else [tensor.detach().requires_grad_() for tensor in constants]


class AbstractGradient(ABC):
    """The total gradient of one problem."""

    @abstractmethod
    def live(self, batch: Any, moment: Moment = NOW) -> tuple[LossOutput, Gradient]:
        """Return the loss of a training step, whose buffers move, and the mean gradient over ranks.

        Args:
            batch: of the problem.
            moment: batches, earlier snapshots and parameters that take the place of the current ones.
        """

    @abstractmethod
    def pure(self, batch: Any, moment: Moment) -> Gradient:
        """Return the mean gradient over ranks; nothing moves.

        Args:
            batch: of the problem.
            moment: batches, earlier snapshots and parameters that take the place of the current ones.
        """


class Differentiated(AbstractGradient):
    """By autograd and pullbacks.

    Args:
        number: of the problem.
        engine: of the program.
    """

    def __init__(self, number: int, engine: Engine) -> None:
        self.plan = GradientPlan(number, engine)
        self._problem = engine.problems[number]
        self._ranks = engine.rank_mean
        self._runs_in_part = runs_in_part(self._problem.module)

    def live(self, batch: Any, moment: Moment = NOW) -> tuple[LossOutput, Gradient]:
        """Return loss and gradient."""
        output, gradient = self.plan.live(batch, moment)
        return output, self._mean(gradient, batch)

    def pure(self, batch: Any, moment: Moment) -> Gradient:
        """Return the gradient."""
        return self._mean(self.plan(batch, moment), batch)

    def _mean(self, gradient: Gradient, batch: Any) -> Gradient:
        if self._runs_in_part:
            return self._ranks.gradient_of_users(gradient, self._problem.own, Share.opened(batch)[1])
        return self._ranks.gradient(gradient, self._problem.own)


class Estimated(AbstractGradient):
    """From values of the loss, which are means over ranks.

    Args:
        number: of the problem.
        engine: of the program.
        algorithm: estimates.
    """

    def __init__(self, number: int, engine: Engine, algorithm: AbstractZerothOrder) -> None:
        self._number = number
        self._engine = engine
        self._algorithm = algorithm
        self._loss = engine.losses[number]
        self._problem = engine.problems[number]
        # All problems below have the same settings; what they keep together is the first one's.
        self._memory = engine.memories[engine.solutions[number][0].number]
        # A lower solution that the tasks share lets one task's loss depend on another one's parameters.
        is_separable = all(each.problem.settings.tasks is not None for each in engine.solutions[number])
        self._num_tasks = self._problem.settings.tasks if is_separable else None

    def live(self, batch: Any, moment: Moment = NOW) -> tuple[LossOutput, Gradient]:
        """Return loss and estimate."""
        return self._loss.live(self._engine.own(self._number), batch), self.pure(batch, moment)

    def pure(self, batch: Any, moment: Moment) -> Gradient:
        """Return the estimate."""
        engine = self._engine

        def loss(theta: Vector, particle: Particle | None) -> Tensor:
            values = engine.nothing()
            values[self._number] = theta
            with torch.no_grad(), full_precision():
                for each in engine.solutions[self._number]:
                    each.roll_out(values, moment, particle)
                value = self._loss(values, batch).loss if self._num_tasks is None else self._loss.by_task(values, batch)
            # Here and not of the result: the algorithm may rank the values.
            return engine.rank_mean.mean([value])[0]

        devices = tuple({device for each in engine.problems for device in each.devices})
        theta, name = self._problem.current(), self._problem.name
        found = self._algorithm.gradient(
            loss, theta, self._memory, devices=devices, num_tasks=self._num_tasks, reader=name
        )
        return [*found]


class LayerParallel(AbstractGradient):
    """By layer-parallel steps; where nothing is to move, as one serial pass.

    Args:
        number: of the problem.
        engine: of the program.
        parallel: takes the steps.
    """

    def __init__(self, number: int, engine: Engine, parallel: AbstractParallel) -> None:
        self._serial = Differentiated(number, engine)
        self._number = number
        self._engine = engine
        self._parallel = parallel

    def live(self, batch: Any, moment: Moment = NOW) -> tuple[LossOutput, Gradient]:
        """Return the loss, and what the problem steps along."""
        engine, parallel, number = self._engine, self._parallel, self._number
        problem, loss = engine.problems[number], engine.losses[number]
        values = engine.own(number)

        def direct(given: Values) -> Tensor:
            return loss(given, batch).loss

        parallel.begin(*Share.opened(batch))
        for each in engine.solutions[number]:
            each.add(values, moment, direct)
        output = parallel.evaluate(lambda: loss.live(values, batch))
        found = parallel.gradient(output.loss, problem.own)
        return output, [*found] if parallel.is_divided else engine.rank_mean.gradient(found, problem.own)

    def pure(self, batch: Any, moment: Moment) -> Gradient:
        """Return the gradient of the serial pass."""
        return self._serial.pure(batch, moment)


class Sharded(AbstractGradient):
    """Of this rank's part of the parameters, while they are divided; gradients pass through no solution.

    Args:
        number: of the problem.
        engine: of the program.
        whole: how the gradient is taken where the parameters are whole: on one rank, and after the training.
    """

    def __init__(self, number: int, engine: Engine, whole: Differentiated) -> None:
        self._number = number
        self._engine = engine
        self._whole = whole
        self._problem = engine.problems[number]

    def live(self, batch: Any, moment: Moment = NOW) -> tuple[LossOutput, Gradient]:
        """Return loss and gradient."""
        shards = self._problem.shards
        if shards is None:
            return self._whole.live(batch)
        output = self._engine.losses[self._number].live(self._engine.own(self._number), batch)
        return output, shards.gradient(output.loss, self._problem.theta, Share.opened(batch)[1])

    def pure(self, batch: Any, moment: Moment) -> Gradient:
        """Return the gradient."""
        shards = self._problem.shards
        if shards is None:
            return self._whole.pure(batch, moment)
        loss = self._engine.losses[self._number](self._engine.own(self._number), batch).loss
        return shards.gradient(loss, self._problem.theta, Share.opened(batch)[1])


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
    plan = Differentiated(number, engine)
    return Sharded(number, engine, plan) if problem.settings.shard else plan
