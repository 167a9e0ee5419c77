"""The loss of a problem as a function of tensors, compiled once: who plays which role, and in which contexts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mlotool.core.bound_module import BoundModule
from mlotool.core.loss_output import LossOutput
from mlotool.core.user_code import Call, note
from mlotool.problem.batches import Share
from mlotool.problem.problem import Problem
from mlotool.problem.tasks import TaskLosses, check_unmoved
from mlotool.problem.trajectory import LowerSnapshots

Tensors = Sequence[Tensor]
"""The trained parameters of one problem, in the order of its `theta`."""

Values = list[Tensors | None]
"""By number of the problem, the tensors in its parameters' places; None is the current ones, as constants."""


@dataclass(frozen=True)
class Moment:
    """What takes the place of current batches and parameters in an evaluation: at an earlier step, or as given.

    Args:
        batches: by problem, in the place of its stream's last batch.
        lower_snapshots: by problem, lower problems as they were at an earlier step.
        parameters: by number of the problem, constants in the place of its current parameters; None takes these.
    """

    batches: Mapping[str, Any] = field(default_factory=dict)
    lower_snapshots: LowerSnapshots = field(default_factory=dict)
    parameters: Sequence[Tensors] | None = None

    def values(self, num_problems: int) -> Values:
        """Return one entry a problem: its tensors here, or None for its current parameters; constants both."""
        return [None] * num_problems if self.parameters is None else list(self.parameters)


NOW = Moment()
"""The current parameters of all problems, and the last batches of their streams."""


class LossPlan:
    """Evaluates the loss of one problem.

    Args:
        number: of the problem.
        problems: all of the program, in order.
    """

    def __init__(self, number: int, problems: Sequence[Problem]) -> None:
        self.problem = problem = problems[number]
        self._problems = problems
        numbers = {other.name: position for position, other in enumerate(problems)}
        self._roles = [
            (role, numbers[player.problem], problems[numbers[player.problem]], player.training)
            for role, player in problem.roles.items()
        ]
        # Those that play a role and have a task axis, and its length.
        self._stacked = sorted({place for _, place, other, _ in self._roles if other.settings.tasks is not None})
        num_tasks = None if not self._stacked else problems[self._stacked[0]].settings.tasks
        self._tasks = None if num_tasks is None else TaskLosses(problem.name, num_tasks, problem.devices)
        # Until its first evaluation has shown it.
        self._keeps_buffers = False
        self._synced = [(other, other.parallel) for other in problems if other.parallel is not None]

    def __call__(self, values: Values, batch: Any, *, live: bool = False) -> LossOutput:
        """Return the loss.

        Args:
            values: tensors by problem.
            batch: of the problem; a Share is weighted.
            live: whether it is that of a training step, in which the problem's own buffers move; else a pure function.
        """
        return self._evaluate(self._whole if self._tasks is None else self._of_tasks, values, batch, live)

    def by_task(self, values: Values, batch: Any) -> Tensor:
        """Return the losses of the problem's own tasks, 1-D. Arguments as for the call."""
        losses = self._evaluate(self._tasks_apart, values, batch, False).loss
        return losses if self.problem.settings.tasks is not None else losses.mean()

    def call_of(self, batch: Any) -> Call:
        """Return in words what the loss is called with, for messages."""
        given = {"batch": batch, **{role: other.module for role, _, other, _ in self._roles}}
        expected, advice = "the loss of such a batch", "Correct the loss, the module or the data."
        return Call(f"problems.{self.problem.name}.loss", self.problem.loss, given, expected, advice)

    def _evaluate(
        self, call: Callable[[Values, Any, bool], LossOutput], values: Values, shared: Any, live: bool
    ) -> LossOutput:
        for other, parallel in self._synced:
            # Its own training step runs the stages where they are.
            if not live or other is not self.problem:
                parallel.sync(None)
        batch, weight = Share.opened(shared)
        try:
            with self.problem.loss_context:
                output = call(values, batch, live)
        except Exception as error:
            note(error, lambda: self.call_of(batch))
            raise
        return Share.weigh(output, weight)

    def _whole(self, values: Values, batch: Any, live: bool) -> LossOutput:
        return LossOutput.of(self.problem.loss(batch, **self._players(values, live)))

    def _players(self, values: Values, live: bool) -> dict[str, BoundModule]:
        own = self.problem
        return {
            role: (other.live if live and other is own else other.pure)(values[place], training)
            for role, place, other, training in self._roles
        }

    def _of_tasks(self, values: Values, batch: Any, live: bool) -> LossOutput:
        output = self._tasks_apart(values, batch, live)
        # Tasks do not share their own parameters: the gradient of the sum is each one's.
        total = output.loss.sum() if self.problem.settings.tasks is not None else output.loss.mean()
        return LossOutput(total, output.metrics)

    def _tasks_apart(self, values: Values, batch: Any, live: bool) -> LossOutput:
        assert self._tasks is not None
        stacked: dict[int, tuple[Tensor, ...]] = {}
        for place in self._stacked:
            tensors = values[place]
            stacked[place] = self._problems[place].current() if tensors is None else tuple(tensors)

        def one(parameters: dict[int, tuple[Tensor, ...]], part: Any) -> LossOutput:
            task = list(values)
            for place, tensors in parameters.items():
                task[place] = tensors
            players = self._players(task, False)
            output = LossOutput.of(self.problem.loss(part, **players))
            if not self._keeps_buffers:
                for role, _, other, _ in self._roles:
                    if other is self.problem:
                        check_unmoved(other.name, players[role])
            return output

        output = self._tasks(one, stacked, batch, with_metrics=live)
        self._keeps_buffers = True
        return output
