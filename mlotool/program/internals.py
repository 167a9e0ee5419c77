"""What steps are taken by, behind a program: its plans, the records of its steps, the looks at its first gradients."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import shown
from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import explained, twice_differentiable, twice_differentiable_mode
from mlotool.core.gradient import dense, values_of
from mlotool.core.loss_output import LossOutput
from mlotool.core.messages import did_you_mean
from mlotool.core.random_stream import RandomStream
from mlotool.core.replay import RandomState
from mlotool.core.user_code import Call
from mlotool.problem import trajectory as recorded
from mlotool.problem.interface import AbstractDirector, AbstractStepwise
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.problem import Problem
from mlotool.problem.rank_mean import Reduce
from mlotool.program.algorithms import SolutionOrder, all_nodes, check_algorithms, find_order, find_zeroth_order
from mlotool.program.gradient_plan import GradientPlan, training_gradient_of
from mlotool.program.graph import Graph
from mlotool.program.rehearsal import Rehearsals
from mlotool.program.solution_plan import NOW, Engine, Moment, See, learned_hyperparameters, start_of

# Steps after which a problem's gradient is no longer looked at; the first one that is sound ends the looks, too.
NUM_LOOKS = 3

_IGNORES_UPPER = (
    "graph.upper_to_lower: '{upper}' shapes '{lower}', but at {count} steps of '{upper}' the loss of '{lower}' did not "
    "depend on the parameters of '{upper}'; expected that it does. Use its role without detach, or remove the edge."
)
_ZERO = (
    "problems.{upper}.loss: the hypergradient of '{upper}' was exactly 0 at {count} steps; expected another number. "
    "Evaluate the role of '{read}' in the loss, without detach. Look for dead units and for factors that are zero at "
    "first. In the lower loss, the parameters of '{upper}' have to interact with those of the lower problem."
)


@dataclass
class Tracing:
    """How the steps of a tick are traced; arguments as for `Program`, where they begin with `trace`."""

    backend: str | None = None
    begins_at: int = 0
    of_users_code: bool = True
    run_length: int | None = None


class Internals:
    """What a schedule, a trace and a run take from a program: plans, records of steps, looks at the first gradients.

    Args:
        problems: by name.
        graph: the edges between them.
        reduce: as for `Program`.
        random: the program's random numbers.
        tracing: how steps are traced.
        held: problems that take no steps.

    Attributes:
        held: the problems that take no steps.
        engine: the problems by number, with the plans of their losses and solutions.
        order: which solutions depend on which parameters.
        recorder: keeps the steps that problems take, for hypergradients that differentiate them.
        rehearsals: evaluate losses before the first step.
        gradients: what each problem steps along, by its name.
        tracing: how steps are traced.

    Raises:
        ConfigError: an algorithm cannot do what the graph asks of it.
    """

    def __init__(
        self,
        problems: Mapping[str, Problem],
        graph: Graph,
        reduce: Reduce | None,
        random: RandomStream,
        tracing: Tracing,
        held: Iterable[str] = (),
    ) -> None:
        self._problems, self._graph, self._random, self.tracing = problems, graph, random, tracing
        self.order = find_order(problems, graph)
        self.held = frozenset(map(self.name_of, held))
        self._steps = {name: () if name in self.held else self.order.steps_of(name) for name in problems}
        self._solved = {step.problem for steps in self._steps.values() for step in steps}
        check_algorithms(problems, self._steps)
        for problem in problems.values():
            if problem.parallel is not None:
                problem.parallel.seed(random.initial_seed)
            if (algorithm := problem.hypergradient) is not None:
                horizon = algorithm.horizon if isinstance(algorithm, AbstractStepwise) else None
                problem.trajectory = recorded.Trajectory(algorithm.sees_steps, horizon)
        self.engine = engine = Engine(list(problems.values()), reduce, self._steps, random)
        self.recorder = StepRecorder(problems, self.order, engine)
        self._zeroth_order = {name: find_zeroth_order(name, problems, self._steps) for name in problems}
        self._plans = plans = {name: GradientPlan(number, engine) for name, number in engine.numbers.items()}
        self.gradients = {name: training_gradient_of(plans[name], engine, self._zeroth_order[name]) for name in plans}
        self.rehearsals = Rehearsals(engine, graph, self._solved)
        differentiated = [name for name, estimate in self._zeroth_order.items() if estimate is None]
        # Problems whose gradient passes through solutions, with the steps at which it seemed to be zero for no reason.
        self._looked_at: dict[str, set[int]] = {name: set() for name in differentiated if self._steps[name]}

    def unrolled_loss(self, name: str, batches: Mapping[str, Any]) -> Tensor:
        """Return the loss of problem `name` after the steps below it, taken functionally; without a graph.

        Args:
            name: the problem.
            batches: as for `gradient`.
        """
        engine, number, batch = self.engine, self.number(name), self.batch(name, batches.get(name))
        with torch.no_grad(), self._random:
            solutions, values = engine.solutions[number], engine.nothing()
            return engine.loss_with(engine.losses[number], solutions, values, batch, Moment(batches))

    def watched(self, name: str, see: See) -> AbstractContextManager[None]:
        """Inside the block, what other problems' modules return in the loss of `name` is what `see` makes of it."""
        return self.engine.losses[self.number(name)].watched(see)

    def direct_loss(self, name: str, batch: Any = None) -> LossOutput:
        """Return the loss of problem `name` as a function of its own parameters alone, all solutions held fixed.

        Args:
            name: the problem.
            batch: its batch; None takes its stream's last one.
        """
        number = self.number(name)
        with self._random:
            return self.engine.losses[number](self.engine.own(number), self.batch(name, batch))

    def rehearse(self, name: str, batch: Any) -> LossOutput:
        """Return the loss of problem `name` as its next step will meet it, with a graph; nothing is updated.

        Args:
            name: the problem.
            batch: its batch.
        """
        with self._random:
            return self.rehearsals(self.number(name), batch)

    def hyperparameters(self, name: str) -> tuple[Hyperparameters, ...] | None:
        """Return the hyperparameters of a problem's optimizer, those included that other problems give.

        Returns:
            One mapping per parameter; None where no problem gives any.
        """
        problem = self._problems[name]
        if not problem.settings.optimizer_roles:
            return None
        with self._random:
            hyperparameters = problem.optimizer_step.hyperparameters()
            return learned_hyperparameters(problem, self.engine, hyperparameters, self.engine.nothing())

    def start(self, name: str) -> tuple[Tensor, ...] | None:
        """Return the parameters that `name` is reset to; None is where it began itself."""
        if self._problems[name].settings.reset_to in (None, "initial"):
            return None
        with self._random:
            return start_of(self._problems[name], self.engine, self.engine.nothing())

    def is_zeroth_order(self, name: str) -> bool:
        """Return whether the gradient of `name` is estimated from values of its loss."""
        return self._zeroth_order[name] is not None

    def call_of(self, name: str, batch: Any) -> Call:
        """Return in words what the loss of `name` is called with, for messages."""
        return self.engine.losses[self.number(name)].call_of(batch)

    def solutions_read_by(self, name: str) -> tuple[str, ...]:
        """Return the problems whose solutions the total gradient of `name` passes through."""
        return tuple(step.problem for step in self._steps[name])

    def solutions_below(self, name: str) -> list[tuple[str, tuple[str, ...]]]:
        """Return each solution that the total gradient of `name` needs, inner ones too, with what it depends on."""
        return [(node.problem, node.inputs) for node in all_nodes(self._steps[name])]

    def plan_of(self, name: str) -> GradientPlan:
        """Return the plan of a gradient that is differentiated."""
        return self._plans[name]

    def is_watched(self, names: Iterable[str]) -> bool:
        """Return whether the gradient of one of the problems is still to be looked at, step by step."""
        return not self._looked_at.keys().isdisjoint(names)

    def look_at(self, name: str, gradient: Sequence[Tensor | None]) -> None:
        """Warn where a problem's first gradients are zero, or a loss that it shapes does not depend on it.

        Autograd tells: a tensor that a loss does not use, or under `no_grad` alone, has no gradient, where one that has
        no effect at the moment has the gradient zero. The first gradient that is sound ends the looks.
        """
        steps = self._looked_at.get(name)
        if steps is None:
            return
        values = [values_of(tensor) for tensor in gradient if tensor is not None and tensor.numel()]
        is_zero = not values or not bool(torch.stack(torch._foreach_norm(values, float("inf"))).any())
        with RandomState(self._problems[name].devices).replayed():
            unused = [x for x in self._graph.upper_to_lower.get(name, ()) if not self._depends_on(x, name)]
        # The batches of one step (accumulate_batches) are one look.
        steps.add(self._problems[name].num_steps)
        is_sound = not (is_zero or unused)
        if is_sound or len(steps) == NUM_LOOKS:
            del self._looked_at[name]
            if not is_sound:
                fields = {"upper": name, "count": NUM_LOOKS, "read": "', '".join(self.solutions_read_by(name))}
                text = _IGNORES_UPPER.format(lower=unused[0], **fields) if unused else _ZERO.format(**fields)
                warnings.warn(text, stacklevel=2)

    def training_gradient(
        self, name: str, batch: Any, batch_number: int | None, moment: Moment = NOW
    ) -> tuple[LossOutput, list[Tensor | None]]:
        """Return the loss of a training step, whose buffers move, and what the problem steps along.

        Args:
            name: the problem.
            batch: its batch.
            batch_number: the batch's position in its stream, where every epoch has the same batches; else None.
            moment: batches, earlier snapshots and parameters that take the place of the current ones.
        """
        output, gradient = self.gradients[name](batch, moment, True)
        assert output is not None
        self.look_at(name, gradient)
        algorithm = self._problems[name].hypergradient
        if not isinstance(algorithm, AbstractDirector) or name not in self._solved:
            return output, gradient
        theta, memory = self._problems[name].current(), self.engine.memories[self.engine.numbers[name]]
        return output, algorithm.step_direction(name, theta, gradient, batch, batch_number, memory)

    def algorithm_state(self, name: str) -> Any:
        """Return what the hypergradient of a problem keeps from one pullback to the next; it is not to be changed.

        Args:
            name: the problem.
        """
        return self.engine.memories[self.number(name)].value

    def sync(self) -> None:
        """Give all ranks the same parameters, buffers and optimizer states, where stages of a module are theirs."""
        for problem in self._problems.values():
            problem.sync()

    def _depends_on(self, lower: str, upper: str) -> bool:
        """Return whether a problem's loss depends on the parameters of one that is said to shape it."""
        problem, algorithm = self._problems[lower], self._problems[lower].hypergradient
        # It may shape the steps or the start in place of the loss.
        is_elsewhere = upper in problem.node.other_uses.values() or problem.parallel is not None
        if algorithm is None or algorithm.is_constant or is_elsewhere or problem.shards is not None:
            return True
        values, numbers = self.engine.nothing(), self.engine.numbers
        # A loss that takes gradients itself, as a penalty on them does, needs its own parameters to have some.
        for name in (lower, upper):
            values[numbers[name]] = [x.requires_grad_() for x in self._problems[name].current()]
        with torch.enable_grad():
            loss = self.engine.losses[numbers[lower]](values, self.batch(lower, None)).loss
        shaping = values[numbers[upper]]
        assert shaping is not None
        slopes = torch.autograd.grad(loss, shaping, allow_unused=True) if loss.requires_grad else ()
        return any(slope is not None for slope in slopes)

    def batch(self, name: str, batch: Any) -> Any:
        """Return a batch that was given, or the stream's last one."""
        stream = self._problems[name].stream
        return stream.last() if batch is None and stream is not None else batch

    def number(self, name: str) -> int:
        """Return the number of a problem."""
        return self.engine.numbers[self.name_of(name)]

    def name_of(self, name: str) -> str:
        """Return a problem's name, once it is known that there is one."""
        if not isinstance(name, str) or name not in self._problems:
            advice = f"{did_you_mean(name, self._problems)} Correct the name."
            raise ConfigError(f"Unknown problem {shown(name)}; expected one of {', '.join(self._problems)}.{advice}")
        return name


class StepRecorder:
    """Keeps what the steps of a program's problems were taken from, in their trajectories.

    Args:
        problems: by name.
        order: which solutions depend on which parameters.
        engine: of the program.
    """

    def __init__(self, problems: Mapping[str, Problem], order: SolutionOrder, engine: Engine) -> None:
        self._problems, self._order, self._engine = problems, order, engine
        # By recorded problem: the lower problems whose parameters its steps read, and those whose solutions they read.
        self._read = {name: order.read_by(name) for name, problem in problems.items() if problem.trajectory.is_kept}

    def state(self, name: str) -> tuple[RandomState, recorded.Buffers]:
        """Return what the next evaluation in a recorded step depends on besides parameters and batch."""
        problem = self._problems[name]
        return RandomState(problem.devices), recorded.buffers_of(problem.module)

    def record(
        self,
        name: str,
        batches: Sequence[Any],
        states: Sequence[tuple[RandomState, recorded.Buffers]],
        graph: recorded.StepGraph | None = None,
        gradient: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Keep the step that a problem is about to take, as far as its hypergradient needs it.

        Args:
            name: the problem.
            batches: of the step.
            states: what `state` returned before the evaluation on each of them.
            graph: of its gradient, where that is kept.
            gradient: over batches and ranks, where it is known already; kept where the hypergradient wants it.
        """
        problem = self._problems[name]
        algorithm = problem.hypergradient
        assert isinstance(algorithm, AbstractStepwise)
        store = algorithm.trajectory
        traits = self._engine.traits[self._engine.numbers[name]]
        prefers_forward = problem.has_blocks and not self.makes_solutions(name) and not traits.lacks_tangents
        is_kept = store.keeps(problem.trajectory.num_taken, problem.settings.unroll_steps)
        step = recorded.StepRecord(
            tuple(tensor.clone() for tensor in problem.current()) if is_kept else (),
            problem.optimizer_state() if is_kept else (),
            tuple(dict(rates) for rates in problem.optimizer_step.hyperparameters()),
            tuple((batch, random) for batch, (random, _) in zip(batches, states, strict=True)),
            self._lower_snapshots(name),
            graph,
            tuple(gradient) if gradient is not None and algorithm.saves_gradients(prefers_forward) else None,
            tuple(buffers for _, buffers in states) if any(buffers for _, buffers in states) else (),
            # A gradient through solutions is an approximation, which is another one where it is differentiated.
            None if self.makes_solutions(name) else recorded.TakenGradient.of(gradient, problem.trajectory),
        )
        problem.trajectory.append(step.on(torch.device("cpu"), pinned=True) if store.offload else step)

    def _lower_snapshots(self, name: str) -> dict[str, recorded.LowerSnapshot]:
        """Return the problems that a step of `name` reads, each with what its pullback needs if it has one there."""
        held, solved = self._read[name]
        snapshots = {}
        for other in (*held, *solved):
            problem = self._problems[other]
            snapshots[other] = recorded.LowerSnapshot(tuple(tensor.clone() for tensor in problem.current()))
            if other in solved:
                stream = None if problem.stream is None else problem.stream.copy()
                steps, has_all = tuple(problem.trajectory), problem.trajectory.has_all
                if isinstance(own := problem.hypergradient, AbstractStepwise) and not own.keeps_graphs:
                    # A budget is for the graphs of one unroll, and this step would hold those of an earlier one.
                    steps = tuple(replace(step, graph=None) for step in steps)
                snapshots[other] = recorded.LowerSnapshot(snapshots[other].theta, stream, steps, has_all)
        return snapshots

    def makes_solutions(self, name: str) -> bool:
        """Return whether solutions are eliminated inside the steps of `name`."""
        return bool(self._read[name][1])

    def leaves(self, name: str) -> dict[int, list[Tensor]]:
        """Return copies of the parameters of `name` and of what shapes it, by number, at which gradients are taken."""
        return {
            self._engine.numbers[other]: [x.clone().requires_grad_() for x in self._problems[other].current()]
            for other in (name, *self._order.inputs(name))
        }

    def kept_gradient(
        self, name: str, batch: Any, leaves: Mapping[int, Sequence[Tensor]]
    ) -> tuple[LossOutput, tuple[Tensor | None, ...]]:
        """Return the loss of a training step and its gradient with a graph, at the tensors of `leaves`.

        Where operators of the loss fail in double backward, it is evaluated with equal ones.

        Args:
            name: the problem, which shapes none that it reads.
            batch: its batch.
            leaves: what `leaves` returned.

        Raises:
            ConfigError: the loss cannot be differentiated twice.
        """
        number, values = self._engine.numbers[name], self._engine.nothing()
        for other, tensors in leaves.items():
            values[other] = tensors
        values[number] = theta = self._engine.means[number].shared(leaves[number])
        loss, traits, devices = self._engine.losses[number], self._engine.traits[number], self._problems[name].devices
        if not (traits.is_twice_differentiable or traits.replaces_operators):
            # The search may evaluate twice: not live, since buffers move once a step.
            with RandomState(devices).replayed():
                twice_differentiable(name, traits, devices, lambda: loss(values, batch).loss)
        with twice_differentiable_mode(name) if traits.replaces_operators else nullcontext():
            output = loss(values, batch, live=True)
        with explained(name, "reverse"):
            return output, dense(torch.autograd.grad(output.loss, theta, create_graph=True, allow_unused=True))
