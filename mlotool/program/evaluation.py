"""Losses with solutions in the parameters' places."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import SGD

from mlotool.core.bound_module import BoundModule
from mlotool.core.loss_output import LossOutput
from mlotool.program.algorithms import Steps
from mlotool.program.dependence import SolutionStep
from mlotool.program.differentiation import AbstractZerothOrder, LowerLoss, Reduce, Unroll, Vector
from mlotool.program.problem import Problem
from mlotool.program.shaping import learned_settings, start_of
from mlotool.program.share import Share
from mlotool.program.tasks import evaluate_tasks
from mlotool.program.trajectory import Inputs
from mlotool.program.update import Settings, State, find_update

Scope = dict[str, Mapping[str, Tensor]]
"""By problem, the tensors that take its parameters' places in one evaluation."""


class Evaluation:
    """Evaluates the losses of a program.

    Args:
        problems: by name.
        steps: the solution nodes that each problem's total gradient needs.
        partial: the problems whose stationarity holds lower solutions fixed.
        reduce: a mean over ranks.
    """

    def __init__(self, problems: Mapping[str, Problem], steps: Steps, partial: frozenset[str], reduce: Reduce) -> None:
        self.problems = problems
        self.reduce = reduce
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._steps = steps
        self._partial = partial
        # By problem, which of those that play a role in its loss have tasks, and how many.
        self._stacked = {
            name: {
                role.problem: tasks
                for role in problem.roles.values()
                if (tasks := problems[role.problem].tasks) is not None
            }
            for name, problem in problems.items()
        }

    def loss(
        self,
        name: str,
        given: Scope,
        batch: Any,
        *,
        steps: Sequence[SolutionStep] | None = None,
        batches: Mapping[str, Any] | None = None,
        is_live: bool = False,
        is_rollout: bool = False,
    ) -> LossOutput:
        """Return the loss of `name` with the tensors of `given` in their places.

        Args:
            name: the problem.
            given: tensors by problem; those that are missing and are no solution are constants.
            batch: the problem's batch.
            steps: the solution nodes to make; None takes those of its total gradient.
            batches: batches of the lower problems, where they are not their streams' last ones.
            is_live: run the problem's module itself, so that its buffers move.
            is_rollout: the solutions are those for the tensors of `given`, as far as their steps give them.
        """
        problem = self.problems[name]
        batch, weight = Share.opened(batch)
        scope = dict(given)
        self.add_solutions(scope, self._steps[name] if steps is None else steps, batches or {}, name, is_rollout)
        stacked = self._stacked[name]
        with self.context():
            if not stacked:
                return Share.weigh(self._call_loss(problem, scope, batch, is_live), weight)
            output = evaluate_tasks(
                lambda tensors, part: self._call_loss(problem, {**scope, **tensors}, part, False),
                {other: scope.get(other) or self.problems[other].constants() for other in stacked},
                batch,
                next(iter(stacked.values())),
                with_metrics=is_live,
            )
        # Tasks do not share their own parameters: the gradient of the sum is each one's.
        total = output.loss.sum() if problem.tasks is not None else output.loss.mean()
        return LossOutput(total, output.metrics)

    def _call_loss(self, problem: Problem, scope: Mapping[str, Any], batch: Any, is_live: bool) -> LossOutput:
        roles = {}
        for role, player in problem.roles.items():
            other = self.problems[player.problem]
            live = is_live and player.problem == problem.name
            tensors = scope.get(player.problem) or other.constants()
            # At the module's own parameters it runs as it stands.
            is_own = live and tensors is other.theta
            roles[role] = BoundModule(
                other.module,
                None if is_own else tensors,
                training=player.training,
                places=other.places,
                moves_buffers=live,
            )
        return LossOutput.of(problem.loss(batch, **roles))

    def add_solutions(
        self,
        scope: Scope,
        steps: Sequence[SolutionStep],
        batches: Mapping[str, Any],
        reader: str,
        is_rollout: bool = False,
    ) -> None:
        """Put the solutions of `steps` into `scope`.

        Args:
            scope: tensors by problem; solutions are added.
            steps: the nodes to make, each after its inputs.
            batches: as for `loss`.
            reader: the problem whose gradient they are for.
            is_rollout: as for `loss`.
        """
        for step in steps:
            lower = self.problems[step.problem]
            inputs: Scope = {}
            for other in step.inputs:
                tensors = scope.get(other) or self.problems[other].constants()
                if other in step.constants:
                    tensors = {key: tensor.detach() for key, tensor in tensors.items()}
                inputs[other] = tensors
            flat = [tensor for tensors in inputs.values() for tensor in tensors.values()]
            assert lower.hypergradient is not None
            is_unrolled = lower.hypergradient.sees_steps
            if not is_unrolled and not any(tensor.requires_grad for tensor in flat):
                scope[step.problem] = lower.constants()
                continue
            lower_loss = self._lower_loss(lower, inputs, batches, reader)
            if is_rollout:
                assert isinstance(lower.hypergradient, AbstractZerothOrder)
                solution = lower.hypergradient.rollout(lower_loss, flat)
            else:
                solution = lower.hypergradient.solution(lower_loss, flat)
            scope[step.problem] = dict(zip(lower.theta, solution, strict=True))

    def _lower_loss(self, lower: Problem, inputs: Scope, batches: Mapping[str, Any], reader: str) -> LowerLoss:
        keys = {other: tuple(tensors) for other, tensors in inputs.items()}
        steps = () if lower.name in self._partial else self._steps[lower.name]
        assert lower.hypergradient is not None
        is_unrolled = lower.hypergradient.sees_steps
        batch = None if is_unrolled else self._pullback_batch(lower, batches)

        def named(flat: Vector) -> Scope:
            values = iter(flat)
            return {other: {key: next(values) for key in names} for other, names in keys.items()}

        def loss(theta: Vector, flat: Vector, batch: Any, readings: Inputs) -> Tensor:
            given = named(flat)
            for other, tensors in readings.items():
                given[other] = {key: _moved(given[other][key], value) for key, value in tensors.items()}
            given[lower.name] = dict(zip(lower.theta, theta, strict=True))
            return self.loss(lower.name, given, batch, steps=steps, batches=batches).loss

        theta = tuple(tensor.detach() for tensor in lower.theta.values())
        samples, weight = Share.opened(batch)
        return LowerLoss(
            lower.name,
            theta,
            lambda theta, flat: loss(theta, flat, batch, {}),
            is_nested=bool(steps),
            reduce=self.reduce,
            unroll=self._unroll(lower, loss, named, batches) if is_unrolled else None,
            num_tasks=lower.tasks,
            module=lower.module,
            batch=samples,
            weight=weight,
            has_linear_step=type(lower.optimizer) is SGD and lower.gradient_clip_norm is None,
            reader=reader,
            batch_number=self._batch_number(lower, batches),
            optimizer_step=lambda theta, gradient: self._next_theta(lower, theta, gradient),
        )

    def _next_theta(self, lower: Problem, theta: Vector, gradient: Vector) -> list[Tensor]:
        find_update(lower.name, lower.optimizer)  # refuses before anything asks for the optimizer's state
        settings = learned_settings(lower, self.problems, lower.settings(), {})
        return lower.pure_step(theta, gradient, lower.optimizer_state(), settings)[0]

    def _pullback_batch(self, lower: Problem, batches: Mapping[str, Any]) -> Any:
        batch = batches.get(lower.name)
        if batch is None and lower.stream is not None:
            batch = lower.stream.peek() if _batch_rule(lower) == "fresh" else lower.stream.last()
        return batch

    def _batch_number(self, lower: Problem, batches: Mapping[str, Any]) -> int | None:
        if lower.stream is None:
            return 0
        is_drawn = batches.get(lower.name) is None and _batch_rule(lower) == "last"
        return getattr(lower.stream, "last_number", None) if is_drawn else None

    def _unroll(
        self,
        lower: Problem,
        loss: Callable[[Vector, Vector, Any, Inputs], Tensor],
        named: Callable[[Vector], Scope],
        batches: Mapping[str, Any],
    ) -> Unroll:
        given = batches.get(lower.name)
        records = () if given is not None else tuple(lower.trajectory)
        if given is None and not records:
            given = [None if lower.stream is None else lower.stream.last()] * lower.unroll_steps
        is_reset, has_start = lower.reset_to is not None, lower.reset_to not in (None, "initial")

        def step(
            theta: Vector,
            gradient: Sequence[Tensor | None],
            state: Sequence[State],
            settings: Sequence[Settings],
            flat: Vector,
        ) -> tuple[list[Tensor], list[State]]:
            return lower.pure_step(
                theta, gradient, state, learned_settings(lower, self.problems, settings, named(flat))
            )

        def begin() -> tuple[Vector, Sequence[State]]:
            if not is_reset:
                return tuple(lower.constants().values()), lower.optimizer_state()
            theta = start_of(lower, self.problems, {}) if has_start else lower.initial
            return theta, tuple({} for _ in lower.theta)

        return Unroll(
            records,
            not records or lower.trajectory.has_all,
            # A list is one of steps; a tuple may be a batch.
            tuple(given) if isinstance(given, list) else (given,) * lower.unroll_steps,
            loss,
            step,
            (lambda flat: start_of(lower, self.problems, named(flat))) if has_start else None,
            begin,
            lower.next_settings,
        )


def _moved(tensor: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the derivative of `tensor`: a lower solution as it was at an earlier step."""
    return value + (tensor - tensor.detach()) if tensor.requires_grad else value


def _batch_rule(problem: Problem) -> str:
    return "last" if problem.hypergradient is None else problem.hypergradient.batch
