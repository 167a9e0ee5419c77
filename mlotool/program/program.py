"""Problems and their graph as one differentiable object."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import require, shown
from mlotool.core.errors import ConfigError, MlotoolError
from mlotool.core.forward_mode import explained, twice_differentiable, twice_differentiable_mode
from mlotool.core.gradient import dense, values_of
from mlotool.core.loss_output import LossOutput
from mlotool.core.messages import did_you_mean
from mlotool.core.plain_state import ADVICE, check_mapping, check_plain
from mlotool.core.private import tree_leaves
from mlotool.core.random_stream import RandomStream
from mlotool.core.replay import RandomState
from mlotool.core.user_code import Call
from mlotool.problem import trajectory as recorded
from mlotool.problem.arguments import check_owners, check_saving, check_shared
from mlotool.problem.interface import AbstractDirector, AbstractStepwise
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.problem import Problem
from mlotool.problem.rank_mean import RankMean, Reduce
from mlotool.problem.saved_form import check_whole
from mlotool.program.algorithms import (
    SolutionOrder,
    algorithm_of,
    all_nodes,
    check_algorithms,
    find_order,
    find_zeroth_order,
)
from mlotool.program.backends import BACKENDS
from mlotool.program.gradient_plan import GradientPlan, training_gradient_of
from mlotool.program.graph import Graph
from mlotool.program.rehearsal import Rehearsals
from mlotool.program.solution_plan import NOW, Engine, Moment, SolutionPlan, Values, learned_hyperparameters, start_of

# Steps after which a problem's gradient is no longer looked at; the first one that is sound ends the looks, too.
NUM_LOOKS = 3

_IGNORES_UPPER = (
    "graph.upper_to_lower: '{upper}' shapes '{lower}', but at {count} steps of '{upper}' the loss of '{lower}' did not "
    "depend on the parameters of '{upper}'; expected that it does. Use its role without detach, or remove the edge."
)
_ZERO = (
    "problems.{upper}.loss: the hypergradient of '{upper}' was exactly 0 at {count} steps; expected another number. "
    "Evaluate the role of '{read}' in the loss, without detach; look for dead units, for factors that are zero at the "
    "start, and whether '{upper}' stands in a term of its own in the loss of what it shapes."
)


def check_saved(problems: Iterable[Problem]) -> None:
    """Refuse problems whose state a checkpoint cannot hold, or that do not take it back.

    Raises:
        ConfigError: with the module, optimizer or scheduler, and the place in its state.
    """
    for problem in problems:
        check_saving(problem.name, problem.module)
        state = {"module": problem.module.state_dict(), **problem.optimizer_step.state_dict()}
        check_plain({problem.name: state}, ConfigError, before_run=True)


@contextmanager
def _told() -> Iterator[None]:
    """Turn what a user's module, optimizer or algorithm says of its state into one message."""
    try:
        yield
    except MlotoolError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
        text = f"state: found one that does not fit ({reason}); expected that of the same program. {ADVICE}"
        raise ConfigError(text) from error


class Program:
    """Optimization problems that shape and read each other.

    A lower problem's solution enters the losses above it as ordinary tensors with a backward of their own, so the
    total gradient of problem k is `torch.autograd.grad(C_k, theta_k)`: PyTorch adds up the cotangents of all paths
    and calls each pullback once. The cost is linear in the edges.

    Args:
        problems: the problems, in the order in which they are reported.
        graph: the edges between them.
        reduce: a mean over ranks of a list of tensors (`Ranks.reduce`); None in one process.
        trace: run the steps of a tick as one flat program, traced once, without autograd: "eager", operation by
            operation, "inductor", compiled, or "cuda_graph", one launch on a GPU; None leaves steps to their plans.
        trace_from: the step of a problem from which on its steps are traced.
        traces_users_code: whether losses and modules of a user's are traced: as pure functions of tensors.
        run_length: ticks of its run, where it is known; traced steps are compared with the plans' 100 times in it.

    Attributes:
        engine: the problems by number, with the plans of their losses and solutions.
        recorder: keeps the steps that problems take, for hypergradients that differentiate them.
        random: its random numbers, from where torch's generators are when it is made; `program.random.manual_seed(0)`
            seeds them anew. `random.state_dict()` belongs into a checkpoint, beside the program's.

    Raises:
        ConfigError: the graph does not fit the problems, or an algorithm cannot do what the graph asks of it.

    Example:
        >>> import torch
        >>> from mlotool import BoundModule, Exact, Implicit
        >>> class Point(torch.nn.Module):
        ...     def __init__(self): super().__init__(); self.x = torch.nn.Parameter(torch.tensor([2.0]))
        ...     def forward(self): return self.x
        >>> lower = Problem("w", Point(), lambda batch, *, w, lam: ((w() - lam()) ** 2).sum(),
        ...                 roles={"w": "w", "lam": "lam"}, hypergradient=Implicit(Exact()))
        >>> upper = Problem("lam", Point(), lambda batch, *, w: (w() ** 2).sum(), roles={"w": "w"})
        >>> program = Program([lower, upper], Graph({"lam": ["w"]}, {"w": ["lam"]}))
        >>> program.gradient("lam")
        {'x': tensor([4.])}
    """

    def __init__(
        self,
        problems: Iterable[Problem],
        graph: Graph,
        reduce: Reduce | None = None,
        *,
        trace: str | None = None,
        trace_from: int = 0,
        traces_users_code: bool = True,
        run_length: int | None = None,
    ) -> None:
        self.problems: dict[str, Problem] = check_program(problems, graph, reduce, trace)
        self.graph = graph
        self._order = find_order(self.problems, graph)
        self._steps = {name: self._order.steps_of(name) for name in self.problems}
        self._solved = {step.problem for steps in self._steps.values() for step in steps}
        check_algorithms(self.problems, self._steps)
        self.random = RandomStream(self.devices)
        for problem in self.problems.values():
            if problem.parallel is not None:
                problem.parallel.seed(self.random.initial_seed)
            if (algorithm := problem.hypergradient) is not None:
                horizon = algorithm.horizon if isinstance(algorithm, AbstractStepwise) else None
                problem.trajectory = recorded.Trajectory(algorithm.sees_steps, horizon)
        self.trace, self.trace_from, self.run_length = trace, trace_from, run_length
        self.traces_users_code = traces_users_code
        self.engine = engine = Engine(list(self.problems.values()), reduce, self._steps, self.random)
        self.recorder = StepRecorder(self.problems, self._order, engine)
        self._zeroth_order = {name: find_zeroth_order(name, self.problems, self._steps) for name in self.problems}
        self._plans = plans = {name: GradientPlan(number, engine) for name, number in engine.numbers.items()}
        self._gradients = {name: training_gradient_of(plans[name], engine, self._zeroth_order[name]) for name in plans}
        self._rehearsals = Rehearsals(engine, graph, self._solved)
        differentiated = [name for name, estimate in self._zeroth_order.items() if estimate is None]
        # Problems whose gradient passes through solutions, with the steps at which it seemed to be zero for no reason.
        self._looked_at: dict[str, set[int]] = {name: set() for name in differentiated if self._steps[name]}

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The CUDA devices of its problems."""
        return tuple({device for problem in self.problems.values() for device in problem.devices})

    @property
    def rank_mean(self) -> RankMean:
        """The mean over ranks."""
        return self.engine.rank_mean

    def loss(self, name: str, batch: Any = None) -> LossOutput:
        """Return the loss of problem `name` at the current parameters, without a graph; nothing is updated.

        Args:
            name: the problem.
            batch: its batch; None takes its stream's last one.
        """
        number = self._number(name)
        with torch.no_grad(), self.random:
            return self.engine.losses[number](self.engine.nothing(), self._batch(name, batch))

    def unrolled_loss(self, name: str, batches: Mapping[str, Any]) -> Tensor:
        """Return the loss of problem `name` after the steps below it, taken functionally; without a graph.

        Args:
            name: the problem.
            batches: as for `gradient`.
        """
        engine, number, batch = self.engine, self._number(name), self._batch(name, batches.get(name))
        with torch.no_grad(), self.random:
            solutions, values = engine.solutions[number], engine.nothing()
            return engine.loss_with(engine.losses[number], solutions, values, batch, Moment(batches))

    def direct_loss(self, name: str, batch: Any = None) -> LossOutput:
        """Return the loss of problem `name` as a function of its own parameters alone, all solutions held fixed.

        Args:
            name: the problem.
            batch: its batch; None takes its stream's last one.
        """
        number = self._number(name)
        with self.random:
            return self.engine.losses[number](self.engine.own(number), self._batch(name, batch))

    def rehearse(self, name: str, batch: Any) -> LossOutput:
        """Return the loss of problem `name` as its next step will meet it, with a graph; nothing is updated.

        Args:
            name: the problem.
            batch: its batch.
        """
        with self.random:
            return self._rehearsals(self._number(name), batch)

    def rehearse_once(self) -> None:
        """Rehearse the losses that have a part in hypergradients, unless that was done; as `Schedule` does."""
        self._rehearsals.once(self.random)

    def gradient(self, name: str, batches: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the TOTAL gradient of problem `name`; parameters, buffers and optimizers stay as they are.

        `dC_k/dtheta_k = partial C_k/partial theta_k + sum over read solutions of (dtheta*_l/dtheta_k)^T
        partial C_k/partial theta*_l`, at the current parameters of all problems.

        Like any evaluation it draws the random numbers of the losses (dropout). An algorithm with a memory moves it, as
        in a training step: the second iterate of Penalty, q and the tables of SABA, the start of the next solve
        (`warm_start`), directions of EvolutionStrategies, columns of Nystrom, the choice of `Unrolled(remat="auto")`.

        Args:
            name: the problem.
            batches: batches by problem; others use the last batch of their stream. Of a lower problem whose
                hypergradient differentiates its steps, a list: those steps are taken functionally from the current
                parameters, each on the next `accumulate_batches` of the list, which has the batches of all steps one
                after the other. Without one, they are the steps it took last; if there are none, `unroll_steps` on
                its stream's last batch.

        Returns:
            A tensor of each parameter's shape by parameter name; zeros where the loss does not depend on it.
        """
        problem, is_mapping = self.problems[self._problem(name)], batches is None or isinstance(batches, Mapping)
        require(is_mapping, "batches", batches, "batches by problem", "Write {'<name>': batch}.")
        given = dict(batches or {})
        for other in given:
            self._problem(other)
        with self.random:
            _, gradient = self._gradients[name](self._batch(name, given.get(name)), Moment(given), False)
        shards = problem.shards
        return {
            key: torch.zeros_like(like) if x is None else x if shards is None else shards.put_together(x, like)
            for (key, like), x in zip(problem.theta.items(), gradient, strict=True)
        }

    def solution(self, name: str) -> dict[str, Tensor]:
        """Return theta*_name as tensors through which gradients flow to the parameters of the problems above it.

        Args:
            name: a problem whose `hypergradient` is set.

        Returns:
            By parameter name, tensors with the current values.
        """
        number = self._number(name)
        algorithm_of(self.problems[name])
        self.sync()
        values: Values = [problem.own for problem in self.problems.values()]
        with self.random:
            for step in self._order.steps_to(name):
                SolutionPlan(step, name, self.engine).add(values, NOW)
        solution = values[number]
        assert solution is not None
        return dict(zip(self.problems[name].theta, solution, strict=True))

    def hyperparameters(self, name: str) -> tuple[Hyperparameters, ...] | None:
        """Return the hyperparameters of a problem's optimizer, those included that other problems give.

        Returns:
            One mapping a parameter; None where no problem gives any.
        """
        problem = self.problems[name]
        if not problem.settings.optimizer_roles:
            return None
        with self.random:
            hyperparameters = problem.optimizer_step.hyperparameters()
            return learned_hyperparameters(problem, self.engine, hyperparameters, self.engine.nothing())

    def start(self, name: str) -> tuple[Tensor, ...] | None:
        """Return the parameters that `name` is reset to; None is where it began itself."""
        if self.problems[name].settings.reset_to in (None, "initial"):
            return None
        with self.random:
            return start_of(self.problems[name], self.engine, self.engine.nothing())

    def is_zeroth_order(self, name: str) -> bool:
        """Return whether the gradient of `name` is estimated from values of its loss."""
        return self._zeroth_order[name] is not None

    def call_of(self, name: str, batch: Any) -> Call:
        """Return in words what the loss of `name` is called with, for messages."""
        return self.engine.losses[self._number(name)].call_of(batch)

    def solutions_read_by(self, name: str) -> tuple[str, ...]:
        """Return the problems whose solutions the total gradient of `name` passes through."""
        return tuple(step.problem for step in self._steps[name])

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
        with RandomState(self.problems[name].devices).replayed():
            unused = [x for x in self.graph.upper_to_lower.get(name, ()) if not self._depends_on(x, name)]
        # The batches of one step (accumulate_batches) are one look.
        steps.add(self.problems[name].num_steps)
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
        output, gradient = self._gradients[name](batch, moment, True)
        assert output is not None
        self.look_at(name, gradient)
        algorithm = self.problems[name].hypergradient
        if not isinstance(algorithm, AbstractDirector) or name not in self._solved:
            return output, gradient
        theta, memory = self.problems[name].current(), self.engine.memories[self.engine.numbers[name]]
        return output, algorithm.step_direction(name, theta, gradient, batch, batch_number, memory)

    def algorithm_state(self, name: str) -> Any:
        """Return what the hypergradient of a problem keeps from one pullback to the next; it is not to be changed.

        Args:
            name: the problem.
        """
        return self.engine.memories[self._number(name)].value

    def solutions_below(self, name: str) -> list[tuple[str, tuple[str, ...]]]:
        """Return each solution that the total gradient of `name` needs, inner ones too, with what it depends on."""
        return [(node.problem, node.inputs) for node in all_nodes(self._steps[name])]

    def statistics(self) -> dict[str, float]:
        """Return what hypergradients and layer-parallel steps report about their last use, as `<problem>/<name>`."""
        numbers: dict[str, float] = {}
        for name, problem in self.problems.items():
            algorithm, parallel = problem.hypergradient, problem.parallel
            values = {} if algorithm is None else algorithm.statistics(self.algorithm_state(name))
            values = values if parallel is None else {**values, **parallel.statistics()}
            numbers |= {f"{name}/{key}": value for key, value in values.items()}
        return numbers

    def sync(self) -> None:
        """Give all ranks the same parameters, buffers and optimizer states, where stages of a module are theirs."""
        for problem in self.problems.values():
            problem.sync()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all problems, in plain containers."""
        state: dict[str, Any] = {}
        for name, problem in self.problems.items():
            algorithm = problem.hypergradient
            kept = {} if algorithm is None else algorithm.state_dict(self.algorithm_state(name))
            state[name] = {**problem.state_dict(), "hypergradient": kept}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state back.

        Raises:
            ConfigError: it is that of other problems, or does not fit their modules or optimizers; nothing is changed.
        """
        problems = self.problems
        require(isinstance(state, Mapping), "state", state, "what state_dict() has returned", "Give that.")
        if set(state) != set(problems):
            names, advice = sorted(map(str, state)), "Load it with the recipe it was saved by."
            raise ConfigError(f"A saved program has the problems {names}; expected {sorted(problems)}. {advice}")
        for name, problem in problems.items():
            check_whole(f"state.{name}", state[name], problem, problems)
        streams = {name: problem.stream for name, problem in problems.items()}
        with _told():
            kept, shapes = {}, {tensor.shape for problem in problems.values() for tensor in problem.own}
            for name, problem in problems.items():
                saved, algorithm, key = state[name].get("hypergradient"), problem.hypergradient, f"state.{name}"
                check_mapping(f"{key}.hypergradient", saved)
                for value in tree_leaves(saved) if type(algorithm).__module__.startswith("mlotool.") else ():
                    # A generator's state is bytes, and a number has no axes.
                    is_vector = isinstance(value, Tensor) and value.dim() > 0 and value.dtype is not torch.uint8
                    is_right = not is_vector or value.shape in shapes
                    require(is_right, f"{key}.hypergradient", value, "tensors in the shapes of parameters", ADVICE)
                kept[name] = None if algorithm is None else algorithm.load_state(saved)
            for name, problem in problems.items():
                problem.load_state_dict(state[name], streams)
                self.engine.memories[self.engine.numbers[name]].value = kept[name]

    def _depends_on(self, lower: str, upper: str) -> bool:
        """Return whether a problem's loss depends on the parameters of one that is said to shape it."""
        problem, algorithm = self.problems[lower], self.problems[lower].hypergradient
        # It may shape the steps or the start in place of the loss.
        is_elsewhere = upper in problem.node.other_uses.values() or problem.parallel is not None
        if algorithm is None or algorithm.is_constant or is_elsewhere or problem.shards is not None:
            return True
        values, numbers = self.engine.nothing(), self.engine.numbers
        # A loss that takes gradients itself, as a penalty on them does, needs its own parameters to have some.
        for name in (lower, upper):
            values[numbers[name]] = [x.requires_grad_() for x in self.problems[name].current()]
        with torch.enable_grad():
            loss = self.engine.losses[numbers[lower]](values, self._batch(lower, None)).loss
        shaping = values[numbers[upper]]
        assert shaping is not None
        slopes = torch.autograd.grad(loss, shaping, allow_unused=True) if loss.requires_grad else ()
        return any(slope is not None for slope in slopes)

    def _batch(self, name: str, batch: Any) -> Any:
        stream = self.problems[name].stream
        return stream.last() if batch is None and stream is not None else batch

    def _number(self, name: str) -> int:
        return self.engine.numbers[self._problem(name)]

    def _problem(self, name: str) -> str:
        if not isinstance(name, str) or name not in self.problems:
            advice = f"{did_you_mean(name, self.problems)} Correct the name."
            raise ConfigError(f"Unknown problem {shown(name)}; expected one of {', '.join(self.problems)}.{advice}")
        return name


def check_program(problems: Any, graph: Any, reduce: Any, trace: Any) -> dict[str, Problem]:
    """Refuse arguments of a program that are of a wrong kind or do not fit each other; return the problems by name.

    Raises:
        ConfigError: they are, or do not.
    """
    listed = list(problems) if isinstance(problems, Iterable) and not isinstance(problems, Mapping) else []
    are_problems = bool(listed) and all(isinstance(problem, Problem) for problem in listed)
    advice = "Write Program([lower, upper], Graph({'upper': ['lower']}, {'lower': ['upper']}))."
    require(are_problems, "Program.problems", problems, "a list of at least one problem", advice)
    require(isinstance(graph, Graph), "Program.graph", graph, "a Graph", advice)
    require(reduce is None or callable(reduce), "Program.reduce", reduce, "a function of a list of tensors, or null")
    require(trace in (None, *BACKENDS), "trace", trace, f"None or one of {', '.join(BACKENDS)}", "Correct trace.")
    if trace == "cuda_graph" and not torch.cuda.is_available():
        text = "trace: found 'cuda_graph', and torch finds no CUDA device; expected one. Write runner.trace=inductor."
        raise ConfigError(text)
    by_name, names = {problem.name: problem for problem in listed}, [problem.name for problem in listed]
    require(len(by_name) == len(names), "problems", names, "names that differ", "Rename one of the problems.")
    graph.validate({name: problem.node for name, problem in by_name.items()})
    check_owners({name: problem.module for name, problem in by_name.items()})
    for problem in listed:
        problem.look_at_module()
    check_shared("parallel", {problem.name: problem.parallel for problem in listed})
    return by_name


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
