"""Losses with solutions in the parameters' places."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import SGD

from mlotool.core.bound_module import BoundModule, tell_of_attribute
from mlotool.core.loss_output import LossOutput
from mlotool.core.precision import full_precision
from mlotool.core.replay import Habit
from mlotool.core.user_code import Call, note
from mlotool.program.algorithms import Steps
from mlotool.program.arguments import needs_batch
from mlotool.program.dependence import SolutionStep
from mlotool.program.differentiation import AbstractZerothOrder, Eliminated, LowerLoss, Particle, Reduce, Unroll, Vector
from mlotool.program.following import moved, push
from mlotool.program.loss_scale import ScaledCotangent
from mlotool.program.problem import Problem
from mlotool.program.shaping import learned_settings, start_of
from mlotool.program.share import Share
from mlotool.program.simulation import check_simulation, simulated_batches
from mlotool.program.stream import SameBatch, Stream
from mlotool.program.tasks import evaluate_tasks
from mlotool.program.trajectory import Reading, Readings
from mlotool.program.update import Settings, State, find_update

Scope = dict[str, Mapping[str, Tensor]]
"""By problem, the tensors that take its parameters' places in one evaluation."""


class Evaluation:
    """Evaluates the losses of a program.

    Args:
        problems: by name.
        steps: the solution nodes that each problem's total gradient needs.
        reduce: a mean over ranks.
    """

    def __init__(self, problems: Mapping[str, Problem], steps: Steps, reduce: Reduce) -> None:
        self.problems = problems
        self.reduce = reduce
        self._steps = steps
        # By problem, which of those that play a role in its loss have tasks, and how many.
        self._stacked = {
            name: {
                role.problem: tasks
                for role in problem.roles.values()
                if (tasks := problems[role.problem].tasks) is not None
            }
            for name, problem in problems.items()
        }
        self._habits = {name: Habit() for name in problems}
        self._parallel = [(each, each.parallel) for each in problems.values() if each.parallel is not None]

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
        by_task: bool = False,
        particle: Particle | None = None,
        readings: Readings | None = None,
        scale: float = 1.0,
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
            by_task: the losses of the problem's own tasks, 1-D, instead of their sum.
            particle: which rollout it is.
            readings: the lower problems whose solutions are not the current ones.
            scale: by which the loss will be multiplied before it is differentiated; pullbacks do not see it.
        """
        problem = self.problems[name]
        for other, parallel in self._parallel:
            # A training step of its own runs the stages where they are.
            if not (is_live and other is problem):
                parallel.sync(None)
        shared = batch
        batch, weight = Share.opened(shared)
        scope = dict(given)
        made = self._steps[name] if steps is None else steps

        def direct(given: Scope) -> Tensor:
            return self.loss(name, given, shared, steps=()).loss

        self.add_solutions(scope, made, batches or {}, name, is_rollout, direct, particle, readings, scale)
        stacked = self._stacked[name]
        try:
            with problem.loss_context:
                if not stacked:
                    return Share.weigh(self._call_loss(problem, scope, batch, is_live), weight)
                output = evaluate_tasks(
                    name,
                    lambda tensors, part: self._call_loss(problem, {**scope, **tensors}, part, False),
                    {other: scope.get(other) or self.problems[other].constants() for other in stacked},
                    batch,
                    next(iter(stacked.values())),
                    with_metrics=is_live,
                )
        except Exception as error:
            has_none = batch is None and problem.stream is None
            if has_none and (wrong := needs_batch(name, error)) is not None:
                raise wrong from error
            tell_of_attribute(error)
            note(error, lambda: self.call_of(name, batch))
            raise
        if by_task and problem.tasks is not None:
            return output
        # Tasks do not share their own parameters: the gradient of the sum is each one's.
        total = output.loss.sum() if problem.tasks is not None else output.loss.mean()
        return LossOutput(total, output.metrics)

    def call_of(self, name: str, batch: Any) -> Call:
        """Return in words what the loss of `name` is called with, for messages."""
        problem = self.problems[name]
        modules = {role: self.problems[player.problem].module for role, player in problem.roles.items()}
        return Call(
            f"problems.{name}.loss",
            problem.loss,
            {"batch": batch, **modules},
            "the loss of such a batch",
            "Correct the loss, the module or the data.",
        )

    def _call_loss(self, problem: Problem, scope: Mapping[str, Any], batch: Any, is_live: bool) -> LossOutput:
        roles = {}
        for role, player in problem.roles.items():
            other = self.problems[player.problem]
            live = is_live and player.problem == problem.name
            tensors = scope.get(player.problem) or other.constants()
            # At the module's own parameters it runs as it stands.
            is_own = live and tensors is other.theta
            if other.shards is not None:
                # To the others it is a constant: `check_algorithms` sees to that.
                is_constant, mode = tensors is not other.theta, player.training
                roles[role] = other.shards.constant(mode) if is_constant else other.shards.own(mode, is_live=live)
                continue
            roles[role] = BoundModule(
                other.module,
                None if is_own else tensors,
                training=player.training,
                places=other.places,
                moves_buffers=live,
                compiled=other.parallel if is_own and other.parallel is not None else other.compiled,
            )
        return LossOutput.of(problem.loss(batch, **roles))

    def add_solutions(
        self,
        scope: Scope,
        steps: Sequence[SolutionStep],
        batches: Mapping[str, Any],
        reader: str,
        is_rollout: bool = False,
        direct: Callable[[Scope], Tensor] | None = None,
        particle: Particle | None = None,
        readings: Readings | None = None,
        scale: float = 1.0,
    ) -> None:
        """Put the solutions of `steps` into `scope`.

        Args:
            scope: tensors by problem; solutions are added.
            steps: the nodes to make, each after its inputs.
            batches: as for `loss`.
            reader: the problem whose gradient they are for.
            is_rollout: as for `loss`.
            direct: the reader's loss on its batch with the tensors of a scope in their places, and no solutions.
            particle: as for `loss`.
            readings: as for `loss`.
            scale: as for `loss`.
        """
        readings = readings or {}
        for step in steps:
            lower, reading = self.problems[step.problem], readings.get(step.problem)
            inputs = self._inputs(step, scope)
            flat = _flat(inputs)
            assert lower.hypergradient is not None
            is_simulated = lower.hypergradient.sees_steps and reading is None
            if not is_simulated and not any(tensor.requires_grad for tensor in flat):
                scope[step.problem] = lower.constants() if reading is None else reading.theta
                continue
            lower_loss = self._lower_loss(step, inputs, batches, reader, readings, direct)
            if scale != 1.0:
                flat = list(ScaledCotangent.apply(scale, *flat))
            if is_rollout:
                assert isinstance(lower.hypergradient, AbstractZerothOrder)
                solution = lower.hypergradient.rollout(replace(lower_loss, particle=particle), flat)
            else:
                solution = lower.hypergradient.solution(lower_loss, flat)
            if scale != 1.0:
                solution = ScaledCotangent.apply(1.0 / scale, *solution)
            scope[step.problem] = dict(zip(lower.theta, solution, strict=True))

    def _inputs(self, step: SolutionStep, scope: Scope) -> Scope:
        """Return the tensors that the solution of `step` takes, by problem."""
        inputs: Scope = {}
        for other in step.inputs:
            tensors = scope.get(other) or self.problems[other].constants()
            if other in step.constants:
                tensors = {key: tensor.detach() for key, tensor in tensors.items()}
            inputs[other] = tensors
        return inputs

    def _lower_loss(
        self,
        step: SolutionStep,
        inputs: Scope,
        batches: Mapping[str, Any],
        reader: str,
        around: Readings,
        direct: Callable[[Scope], Tensor] | None = None,
    ) -> LowerLoss:
        """Return the loss of a lower problem.

        Args:
            step: of its node.
            inputs: by problem, the tensors that it takes.
            batches: as for `loss`.
            reader: the problem whose gradient it is for.
            around: the readings of the evaluation that the node is made in.
            direct: as for `add_solutions`.
        """
        lower, reading = self.problems[step.problem], around.get(step.problem)
        keys = {other: tuple(tensors) for other, tensors in inputs.items()}
        assert lower.hypergradient is not None
        is_unrolled = lower.hypergradient.sees_steps
        needs_full_precision = lower.precision != "fp32" and lower.hypergradient.needs_full_precision
        stream = lower.stream if reading is None else reading.stream
        batch = None if is_unrolled else _pullback_batch(lower, stream, batches)
        held: Scope = {other: each.theta for other, each in around.items()}

        def named(flat: Vector) -> Scope:
            values = iter(flat)
            return {other: {key: next(values) for key in names} for other, names in keys.items()}

        def loss(theta: Vector, flat: Vector, batch: Any, given: Scope, readings: Readings, drawn: Any) -> Tensor:
            scope = {**held, **given, lower.name: dict(zip(lower.theta, theta, strict=True))}
            with full_precision() if needs_full_precision else nullcontext():
                return self.loss(lower.name, scope, batch, steps=step.inner, batches=drawn, readings=readings).loss

        def at_step(theta: Vector, flat: Vector, batch: Any, readings: Readings) -> Tensor:
            given = named(flat)
            for other, then in readings.items():
                given[other] = _as_then(given[other], then.theta) if other in given else then.theta
            # Batches that are given belong to the lower problems as they are now.
            return loss(theta, flat, batch, given, {**around, **readings}, {} if readings else batches)

        theta = tuple(tensor.detach() for tensor in (lower.theta if reading is None else reading.theta).values())
        is_mean = lower.tasks is not None and self.problems[reader].tasks is None
        samples, weight = Share.opened(batch)
        return LowerLoss(
            lower.name,
            theta,
            lambda theta, flat: loss(theta, flat, batch, named(flat), around, batches),
            is_nested=bool(step.inner),
            reduce=self.reduce,
            unroll=self._unroll(lower, reading, at_step, named, batches) if is_unrolled else None,
            num_tasks=lower.tasks,
            module=lower.module,
            batch=samples,
            weight=weight,
            has_linear_step=type(lower.optimizer) is SGD and lower.gradient_clip_norm is None,
            reader=reader,
            batch_number=_batch_number(lower, stream, batches),
            precision=lower.precision,
            optimizer_step=lambda theta, gradient: self._next_theta(lower, theta, gradient),
            reader_loss=None if direct is None else lambda flat: direct(named(flat)),
            cotangent_scale=float(lower.tasks or 1) if is_mean else 1.0,
            habit=self._habits[lower.name],
            eliminated=self._eliminated(step, named, loss, batch, batches, around) if step.inner else None,
        )

    def _eliminated(
        self,
        step: SolutionStep,
        named: Callable[[Vector], Scope],
        loss: Callable[[Vector, Vector, Any, Scope, Readings, Any], Tensor],
        batch: Any,
        batches: Mapping[str, Any],
        around: Readings,
    ) -> Eliminated:
        lower = self.problems[step.problem]

        def at(inner: SolutionStep, scope: Scope) -> tuple[Scope, LowerLoss]:
            inputs = self._inputs(inner, scope)
            return inputs, self._lower_loss(inner, inputs, batches, lower.name, around)

        def push_from(theta: Vector, flat: Vector, direction: Vector) -> dict[str, Vector]:
            scope = {**named(flat), lower.name: dict(zip(lower.theta, theta, strict=True))}
            moves: dict[str, Vector] = {lower.name: direction}
            push(step.inner, scope, moves, self.problems, at)
            del moves[lower.name]
            return moves

        def function(theta: Vector, flat: Vector, moves: Mapping[str, Vector]) -> Tensor:
            after = {name: moved(self.problems[name], around.get(name), move) for name, move in moves.items()}
            return loss(theta, flat, batch, named(flat), {**around, **after}, batches)

        return Eliminated(push_from, function)

    def _next_theta(self, lower: Problem, theta: Vector, gradient: Vector) -> list[Tensor]:
        find_update(lower.name, lower.optimizer)  # refuses before anything asks for the optimizer's state
        settings = learned_settings(lower, self.problems, lower.settings(), {})
        return lower.pure_step(theta, gradient, lower.optimizer_state(), settings)[0]

    def _unroll(
        self,
        lower: Problem,
        reading: Reading | None,
        loss: Callable[[Vector, Vector, Any, Readings], Tensor],
        named: Callable[[Vector], Scope],
        batches: Mapping[str, Any],
    ) -> Unroll:
        given = batches.get(lower.name)
        if reading is not None:
            records, has_all = reading.steps, reading.has_all
        else:
            records, has_all = () if given is not None else tuple(lower.trajectory), lower.trajectory.has_all
        simulated = () if records else simulated_batches(lower, given)
        if len(simulated) > 1:
            check_simulation(lower, [self.problems[each.problem] for each in self._steps[lower.name]], batches)
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
            state: tuple[State, ...] = tuple({} for _ in lower.theta)
            if has_start:
                return start_of(lower, self.problems, {}), state
            # The problem may have been moved since it was made.
            return tuple(x.to(now.device) for x, now in zip(lower.initial, lower.theta.values(), strict=True)), state

        return Unroll(
            records,
            not records or has_all,
            simulated,
            loss,
            step,
            (lambda flat: start_of(lower, self.problems, named(flat))) if has_start else None,
            begin,
            lower.next_settings,
        )


def _flat(tensors: Scope) -> list[Tensor]:
    return [tensor for each in tensors.values() for tensor in each.values()]


def _as_then(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `values`, of an earlier step, with the derivatives of `tensors`, which have moved on."""
    return {
        key: values[key] + (tensor - tensor.detach()) if tensor.requires_grad else values[key]
        for key, tensor in tensors.items()
    }


def _pullback_batch(problem: Problem, stream: Stream | SameBatch | None, batches: Mapping[str, Any]) -> Any:
    batch = batches.get(problem.name)
    if batch is None and stream is not None:
        batch = stream.peek() if _batch_rule(problem) == "fresh" else stream.last()
    return batch


def _batch_number(problem: Problem, stream: Stream | SameBatch | None, batches: Mapping[str, Any]) -> int | None:
    if problem.stream is None:
        return 0
    is_drawn = batches.get(problem.name) is None and _batch_rule(problem) == "last"
    return getattr(stream, "last_number", None) if is_drawn else None


def _batch_rule(problem: Problem) -> str:
    return "last" if problem.hypergradient is None else problem.hypergradient.batch
