"""What a problem's own training step follows: its loss, and the mean over ranks of its total gradient."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from mlotool.core.loss_output import LossOutput
from mlotool.core.precision import full_precision
from mlotool.problem.batches import Share
from mlotool.problem.interface import AbstractZerothOrder, Particle, Vector
from mlotool.problem.parallel import AbstractParallel
from mlotool.problem.shards import runs_in_part
from mlotool.program.engine import Engine
from mlotool.program.gradient_plan import Gradient, GradientPlan
from mlotool.program.loss_plan import NOW, Moment, Values


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
