"""The loss of a problem as a function of tensors, compiled once: who plays which role, and in which contexts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mlotool.core.bound_module import BoundModule, tell_of_attribute
from mlotool.core.loss_output import LossOutput
from mlotool.core.user_code import Call, note
from mlotool.problem.arguments import needs_batch
from mlotool.problem.batch_share import Share
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
        numbers = {each.name: position for position, each in enumerate(problems)}
        self._roles = [
            (role, numbers[player.problem], problems[numbers[player.problem]], player.training)
            for role, player in problem.roles.items()
        ]
        self._live_roles = [(*role, role[1] == number) for role in self._roles]
        # Those that play a role and have a task axis, and its length.
        self._stacked = sorted({place for _, place, other, _ in self._roles if other.settings.tasks is not None})
        num_tasks = None if not self._stacked else problems[self._stacked[0]].settings.tasks
        self._tasks = None if num_tasks is None else TaskLosses(problem.name, num_tasks, problem.devices)
        # Until its first evaluation has shown it.
        self._keeps_buffers = False
        self._is_plain = problem.settings.precision == "fp32"
        self._synced = [each for each in problems if each.parallel is not None]
        self._call: Callable[[Values, Any], LossOutput] = self._pure if self._tasks is None else self._of_tasks
        self._live_call = self._live if self._tasks is None else self._live_of_tasks

    def __call__(self, values: Values, batch: Any) -> LossOutput:
        """Return the loss as a pure function: no buffer moves.

        Args:
            values: tensors by problem.
            batch: of the problem; a Share is weighted.
        """
        for each in self._synced:
            each.sync_parallel()
        return self._evaluate(self._call, values, batch)

    def live(self, values: Values, batch: Any) -> LossOutput:
        """Return the loss of a training step: the problem's own buffers move. Arguments as for the call."""
        for each in self._synced:
            # Its own training step runs the stages where they are.
            if each is not self.problem:
                each.sync_parallel()
        return self._evaluate(self._live_call, values, batch)

    def by_task(self, values: Values, batch: Any) -> Tensor:
        """Return the losses of the problem's own tasks, 1-D. Arguments as for the call."""
        for each in self._synced:
            each.sync_parallel()
        losses = self._evaluate(lambda *given: self._tasks_apart(*given, with_metrics=False), values, batch).loss
        return losses if self.problem.settings.tasks is not None else losses.mean()

    def call_of(self, batch: Any) -> Call:
        """Return in words what the loss is called with, for messages."""
        modules = {role: other.module for role, _, other, _ in self._roles}
        return Call(
            f"problems.{self.problem.name}.loss",
            self.problem.loss,
            {"batch": batch, **modules},
            "the loss of such a batch",
            "Correct the loss, the module or the data.",
        )

    def _evaluate(self, call: Callable[[Values, Any], LossOutput], values: Values, shared: Any) -> LossOutput:
        batch, weight = (shared.batch, shared.weight) if type(shared) is Share else (shared, 1.0)
        try:
            if self._is_plain:
                output = call(values, batch)
            else:
                with self.problem.loss_context:
                    output = call(values, batch)
        except Exception as error:
            has_none = batch is None and self.problem.stream is None
            if has_none and (wrong := needs_batch(self.problem.name, error)) is not None:
                raise wrong from error
            tell_of_attribute(error)
            note(error, lambda: self.call_of(batch))
            raise
        return output if weight == 1.0 else Share.weigh(output, weight)

    def _pure(self, values: Values, batch: Any) -> LossOutput:
        return LossOutput.of(self.problem.loss(batch, **self._players(values)))

    def _players(self, values: Values) -> dict[str, BoundModule]:
        return {role: other.player.pure(values[place], training) for role, place, other, training in self._roles}

    def _live(self, values: Values, batch: Any) -> LossOutput:
        roles = {
            role: (other.player.live if is_own else other.player.pure)(values[place], training)
            for role, place, other, training, is_own in self._live_roles
        }
        return LossOutput.of(self.problem.loss(batch, **roles))

    def _of_tasks(self, values: Values, batch: Any) -> LossOutput:
        return self._joined(self._tasks_apart(values, batch, with_metrics=False))

    def _live_of_tasks(self, values: Values, batch: Any) -> LossOutput:
        return self._joined(self._tasks_apart(values, batch, with_metrics=True))

    def _joined(self, output: LossOutput) -> LossOutput:
        # Tasks do not share their own parameters: the gradient of the sum is each one's.
        total = output.loss.sum() if self.problem.settings.tasks is not None else output.loss.mean()
        return LossOutput(total, output.metrics)

    def _tasks_apart(self, values: Values, batch: Any, *, with_metrics: bool) -> LossOutput:
        assert self._tasks is not None
        stacked = {place: tuple(_or_current(values[place], self._problems[place])) for place in self._stacked}

        def one(tensors: dict[int, tuple[Tensor, ...]], part: Any) -> LossOutput:
            task = list(values)
            for place, each in tensors.items():
                task[place] = each
            players = self._players(task)
            output = LossOutput.of(self.problem.loss(part, **players))
            if not self._keeps_buffers:
                for role, _, other, _ in self._roles:
                    if other is self.problem:
                        check_unmoved(other.name, players[role])
            return output

        output = self._tasks(one, stacked, batch, with_metrics=with_metrics)
        self._keeps_buffers = True
        return output


def _or_current(tensors: Tensors | None, problem: Problem) -> Tensors:
    return problem.current() if tensors is None else tensors
