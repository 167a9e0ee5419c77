"""Problems and their graph as one differentiable object."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import require, shown
from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.core.precision import full_precision
from mlotool.core.replay import RandomState
from mlotool.core.suggest import did_you_mean
from mlotool.core.user_code import Call
from mlotool.program.algorithms import algorithm_of, check_algorithms, find_zeroth_order
from mlotool.program.arguments import check_program
from mlotool.program.dependence import Dependence
from mlotool.program.differentiation import AbstractZerothOrder, Particle, Reduce, Vector, identity_reduce
from mlotool.program.evaluation import Evaluation, Scope
from mlotool.program.graph import Graph
from mlotool.program.pace import takes_several_steps
from mlotool.program.parallel import StageDone
from mlotool.program.problem import Problem
from mlotool.program.rehearsal import rehearsed_loss
from mlotool.program.shaping import learned_settings, start_of
from mlotool.program.share import Share
from mlotool.program.trajectory import Reading, StepGraph, StepRecord, Trajectory
from mlotool.program.unused import UnusedWatch
from mlotool.program.update import Settings
from mlotool.program.usable import check_kept, check_owners, check_shared, check_state, without_gradient


class Program:
    """Optimization problems that shape and read each other.

    A lower problem's solution enters the losses above it as ordinary tensors with a backward of their own, so the
    total gradient of problem k is `torch.autograd.grad(C_k, theta_k)`: PyTorch adds up the cotangents of all paths
    and calls each pullback once. The cost is linear in the edges.

    Args:
        problems: the problems, in the order in which they are reported.
        graph: the edges between them.
        reduce: a mean over ranks of a list of tensors; None in one process.

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

    def __init__(self, problems: Iterable[Problem], graph: Graph, reduce: Reduce | None = None) -> None:
        problems = check_program(problems, graph, reduce)
        self.problems: dict[str, Problem] = {problem.name: problem for problem in problems}
        if len(self.problems) < len(problems):
            names = [problem.name for problem in problems]
            raise ConfigError(f"problems: found the names {names}; expected each once. Rename one of the problems.")
        self.graph = graph
        graph.validate({name: problem.node for name, problem in self.problems.items()})
        check_owners({name: problem.module for name, problem in self.problems.items()})
        for problem in problems:
            check_kept(problem.name, problem.module, problem.theta)
        check_shared("parallel", {each.name: each.parallel for each in problems})
        partial = [name for name, each in self.problems.items() if _curvature(each) == "partial"]
        stepwise = [name for name, each in self.problems.items() if _is_stepwise(each, self.problems, graph)]
        self._dependence = Dependence(graph, partial, stepwise)
        self._steps = {name: self._dependence.steps_of(name) for name in self.problems}
        self._solved = frozenset(step.problem for steps in self._steps.values() for step in steps)
        check_algorithms(self.problems, self._steps)
        self._evaluation = Evaluation(self.problems, self._steps, reduce or identity_reduce)
        self._zeroth_order = {name: find_zeroth_order(name, self.problems, self._steps) for name in self.problems}
        read = {name: [step.problem for step in steps] for name, steps in self._steps.items()}
        estimated = [name for name, each in self._zeroth_order.items() if each is not None]
        self._unused = UnusedWatch(self.problems, graph.upper_to_lower, read, estimated)
        for problem in self.problems.values():
            if problem.hypergradient is not None:
                problem.trajectory = Trajectory(problem.hypergradient.sees_steps, problem.hypergradient.horizon)
        recorded = [name for name, problem in self.problems.items() if problem.trajectory.is_kept]
        self._read = {name: self._dependence.read_by(name) for name in recorded}

    @property
    def reduce(self) -> Reduce:
        """The mean over ranks."""
        return self._evaluation.reduce

    @reduce.setter
    def reduce(self, reduce: Reduce) -> None:
        self._evaluation.reduce = reduce

    def loss(self, name: str, batch: Any = None) -> LossOutput:
        """Return the loss of problem `name` at the current parameters, without a graph; nothing is updated.

        Args:
            name: the problem.
            batch: its batch; None takes its stream's last one.
        """
        problem = self._problem(name)
        with torch.no_grad():
            return self._evaluation.loss(name, {name: problem.constants()}, self._batch(name, batch), steps=())

    def unrolled_loss(self, name: str, batches: Mapping[str, Any]) -> LossOutput:
        """Return the loss of problem `name` after the steps below it, taken functionally; without a graph.

        Args:
            name: the problem.
            batches: as for `gradient`.
        """
        given: Scope = {name: self._problem(name).constants()}
        with torch.no_grad():
            return self._evaluation.loss(name, given, self._batch(name, batches.get(name)), batches=batches)

    def direct_loss(self, name: str, batch: Any = None) -> LossOutput:
        """Return the loss of problem `name` as a function of its own parameters alone, all solutions held fixed.

        Args:
            name: the problem.
            batch: its batch; None takes its stream's last one.
        """
        problem = self._problem(name)
        return self._evaluation.loss(name, {name: problem.theta}, self._batch(name, batch), steps=())

    def rehearse(self, name: str, batch: Any) -> LossOutput:
        """Return the loss of problem `name` as its next step will meet it, with a graph; nothing is updated.

        Args:
            name: the problem.
            batch: its batch.

        Raises:
            ConfigError: the loss has changed parameters.
        """
        solved = {step.problem for step in self._steps[self._problem(name).name]}
        algorithm = self.problems[name].hypergradient
        is_repeated = name in self._solved and algorithm is not None and not algorithm.is_constant
        return rehearsed_loss(self._evaluation, name, solved, batch, is_repeated=is_repeated)

    def gradient(self, name: str, batches: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the TOTAL gradient of problem `name`; parameters, buffers and optimizers stay as they are.

        `dC_k/dtheta_k = partial C_k/partial theta_k + sum over read solutions of (dtheta*_l/dtheta_k)^T
        partial C_k/partial theta*_l`, at the current parameters of all problems.

        Like any evaluation it draws the random numbers of the losses (dropout), and none if they draw none. An
        algorithm with a memory moves it, as in a training step: the second iterate of Penalty, q and the tables of
        SABA, the start of the next solve (`warm_start`), the directions of EvolutionStrategies, the columns of Nystrom.

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
        problem = self._problem(name)
        require(
            isinstance(batches, Mapping | None), "batches", batches, "batches by problem", "Write {'<name>': batch}."
        )
        given = dict(batches or {})
        for other in given:
            self._problem(other)
        batch = self._batch(name, given.get(name))
        if self._zeroth_order[name] is None:
            scale = problem.loss_scale.value if problem.loss_scale is not None else 1.0
            loss = self._evaluation.loss(name, {name: problem.theta}, batch, batches=given, scale=scale).loss
            gradient = self.differentiate(name, loss)
        else:
            gradient = self._estimate(name, batch, given)
        return {
            key: torch.zeros_like(tensor) if value is None else problem.as_parameter(value, tensor)
            for (key, tensor), value in zip(problem.theta.items(), gradient, strict=True)
        }

    def solution(self, name: str) -> dict[str, Tensor]:
        """Return theta*_name as tensors through which gradients flow to the parameters of the problems above it.

        Args:
            name: a problem whose `hypergradient` is set.

        Returns:
            By parameter name, tensors with the current values.
        """
        problem = self._problem(name)
        algorithm_of(problem)
        self.sync()
        scope: Scope = {other: each.theta for other, each in self.problems.items()}
        self._evaluation.add_solutions(scope, self._dependence.steps_to(name), {}, name)
        return dict(scope[name])

    def settings(self, name: str, scope: Scope | None = None) -> tuple[Settings, ...] | None:
        """Return the hyperparameters of a problem's optimizer, those included that other problems give.

        Args:
            name: the problem.
            scope: tensors by problem; None takes the current parameters.

        Returns:
            One mapping a parameter; None where no problem gives any.
        """
        problem = self.problems[name]
        if not problem.optimizer_roles:
            return None
        return learned_settings(problem, self.problems, problem.settings(), scope or {})

    def start(self, name: str) -> tuple[Tensor, ...] | None:
        """Return the parameters that `name` is reset to; None is where it began itself."""
        source = self.problems[name].reset_to
        return None if source in (None, "initial") else start_of(self.problems[name], self.problems, {})

    def record(
        self, name: str, batches: Sequence[Any], randoms: Sequence[RandomState], graph: StepGraph | None = None
    ) -> None:
        """Keep the step that a problem is about to take, as far as its hypergradient needs it.

        Args:
            name: the problem.
            batches: of the step.
            randoms: the random state before the evaluation on each of them.
            graph: of its gradient, where that is kept.
        """
        problem = self.problems[name]
        problem.trajectory.append(
            StepRecord(
                tuple(tensor.clone() for tensor in problem.constants().values()),
                problem.optimizer_state(),
                tuple(dict(settings) for settings in problem.settings()),
                tuple(zip(batches, randoms, strict=True)),
                self._readings(name),
                graph,
            )
        )

    def _readings(self, name: str) -> dict[str, Reading]:
        """Return the problems that a step of `name` reads, each with what its pullback needs if it has one there."""
        held, solved = self._read[name]
        found = {}
        for other in (*held, *solved):
            problem = self.problems[other]
            theta = {key: tensor.clone() for key, tensor in problem.constants().items()}
            found[other] = Reading(theta)
            if other in solved:
                stream = None if problem.stream is None else problem.stream.copy()
                found[other] = Reading(theta, stream, tuple(problem.trajectory), problem.trajectory.has_all)
        return found

    def is_zeroth_order(self, name: str) -> bool:
        """Return whether the gradient of `name` is estimated from values of its loss."""
        return self._zeroth_order[name] is not None

    def call_of(self, name: str, batch: Any) -> Call:
        """Return in words what the loss of `name` is called with, for messages."""
        return self._evaluation.call_of(name, batch)

    def makes_solutions(self, name: str) -> bool:
        """Return whether solutions are eliminated inside the steps of `name`."""
        return bool(self._read[name][1])

    def reads_solutions(self, name: str) -> bool:
        """Return whether the total gradient of `name` passes through solutions."""
        return bool(self._steps[name])

    def leaves(self, name: str) -> Scope:
        """Return copies of the parameters of `name` and of what shapes it, by problem, at which gradients are taken."""
        return {
            other: {key: tensor.clone().requires_grad_() for key, tensor in self.problems[other].constants().items()}
            for other in (name, *self._dependence.inputs(name))
        }

    def kept_gradient(self, name: str, batch: Any, scope: Scope) -> tuple[LossOutput, tuple[Tensor | None, ...]]:
        """Return the loss of a training step and its gradient with a graph, at the tensors of `scope`.

        Args:
            name: the problem, which shapes none that it reads.
            batch: its batch.
            scope: what `leaves` returned.
        """
        output = self._evaluation.loss(name, scope, batch, steps=(), is_live=True)
        theta = list(scope[name].values())
        slopes = torch.autograd.grad(output.loss, theta, create_graph=True, allow_unused=True)
        return output, slopes

    def live_loss(self, name: str, batch: Any) -> LossOutput:
        """Return the loss of problem `name` for a training step: its own buffers move, the graph is kept."""
        problem = self.problems[name]
        scale = problem.loss_scale.value if problem.loss_scale is not None else 1.0
        if problem.parallel is None:
            return self._evaluation.loss(name, {name: problem.theta}, batch, is_live=True, scale=scale)
        problem.parallel.begin(*Share.opened(batch))
        try:
            output = self._evaluation.loss(name, {name: problem.theta}, batch, is_live=True, scale=scale)
        except StageDone:
            return problem.parallel.output()
        problem.parallel.publish(output)
        return output

    def differentiate(
        self, name: str, loss: Tensor, batch: Any = None, *, is_live: bool = False
    ) -> list[Tensor | None]:
        """Return the mean over ranks of the gradient of `loss` with respect to theta of problem `name`.

        Args:
            name: the problem.
            loss: with its graph; not looked at where an algorithm of zeroth order evaluates it anew.
            batch: that the loss was evaluated on.
            is_live: the loss is one of `live_loss`; a layer-parallel problem then steps along what it makes of it.
        """
        if self._zeroth_order[name] is not None:
            return self._estimate(name, batch, {})
        parameters = list(self.problems[name].theta.values())
        parallel = self.problems[name].parallel
        if is_live and parallel is not None:
            found = parallel.gradient(loss, parameters)
            return [*found] if parallel.is_divided else self._reduced(found)
        if not loss.requires_grad:
            raise without_gradient(name)
        shards = self.problems[name].shards
        if shards is not None:
            return shards.gradient(loss, self.problems[name].theta)
        loss_scale = self.problems[name].loss_scale
        gradient: Sequence[Tensor | None] = torch.autograd.grad(
            loss if loss_scale is None else loss * loss_scale.value, parameters, allow_unused=True
        )
        if is_live and not self._steps[name] and all(each is None for each in gradient):
            # Of an evaluation before: what a loss or a module has kept.
            raise without_gradient(name)
        if loss_scale is not None:
            gradient = loss_scale.unscaled(gradient)
        reduced = self._reduced(gradient)
        if is_live and name in self._unused.waiting:
            self._unused.look(name, reduced, self._held_loss)
        return reduced

    def step_direction(
        self, name: str, gradient: list[Tensor | None], batch: Any, batch_number: int | None
    ) -> list[Tensor | None]:
        """Return what problem `name` steps along: its gradient, or what its hypergradient makes of it.

        Args:
            name: the problem.
            gradient: what `differentiate` returned.
            batch: that it is of.
            batch_number: the batch's position in its stream, where every epoch has the same batches; else None.
        """
        algorithm = self.problems[name].hypergradient
        if algorithm is None or name not in self._solved:
            return gradient
        theta = [tensor.detach() for tensor in self.problems[name].theta.values()]
        return algorithm.step_direction(name, theta, gradient, batch, batch_number)

    def statistics(self) -> dict[str, float]:
        """Return what hypergradients and layer-parallel steps report about their last use, as `<problem>/<name>`."""
        return {
            f"{name}/{key}": value
            for name, problem in self.problems.items()
            for source in (problem.hypergradient, problem.parallel)
            if source is not None
            for key, value in source.statistics().items()
        }

    def sync(self) -> None:
        """Give all ranks the same parameters, buffers and optimizer states, where stages of a module are theirs."""
        for problem in self.problems.values():
            problem.sync()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all problems, in plain containers."""
        return {name: problem.state_dict() for name, problem in self.problems.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state back."""
        require(isinstance(state, Mapping), "state", state, "what state_dict() has returned", "Give that.")
        if set(state) != set(self.problems):
            raise ConfigError(
                f"A saved program has the problems {sorted(state)}; expected {sorted(self.problems)}. "
                "Load it with the recipe it was saved by."
            )
        streams = {name: problem.stream for name, problem in self.problems.items()}
        for name, problem in self.problems.items():
            check_state(name, state[name], problem.module, problem.optimizer, is_whole=problem.shards is None)
        for name, problem in self.problems.items():
            problem.load_state_dict(state[name], streams)

    def _held_loss(self, name: str, given: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        scope: Scope = {other: dict(tensors) for other, tensors in given.items()}
        return self._evaluation.loss(name, scope, self._batch(name, None), steps=()).loss

    def _reduced(self, gradient: Sequence[Tensor | None]) -> list[Tensor | None]:
        # What is unused stays None, on all ranks alike: an optimizer then leaves it alone.
        reduced = iter(self.reduce([tensor for tensor in gradient if tensor is not None]))
        return [None if tensor is None else next(reduced) for tensor in gradient]

    def _estimate(self, name: str, batch: Any, batches: Mapping[str, Any]) -> list[Tensor | None]:
        """Return a gradient from values of the loss of `name`, which are means over ranks."""
        algorithm = self._zeroth_order[name]
        assert algorithm is not None
        problem = self.problems[name]
        # A lower solution that the tasks share lets one task's loss depend on another one's parameters.
        is_separable = all(self.problems[step.problem].tasks is not None for step in self._steps[name])
        num_tasks = problem.tasks if is_separable else None

        def loss(theta: Vector, particle: Particle | None) -> Tensor:
            given: Scope = {name: dict(zip(problem.theta, theta, strict=True))}
            by_task = num_tasks is not None
            with torch.no_grad(), full_precision():
                value = self._evaluation.loss(
                    name, given, batch, batches=batches, is_rollout=True, by_task=by_task, particle=particle
                ).loss
            # Here and not of the result: the algorithm may rank the values.
            return self.reduce([value])[0]

        devices = tuple({device for each in self.problems.values() for device in each.devices})
        theta = [tensor.detach() for tensor in problem.theta.values()]
        return [*algorithm.gradient(loss, theta, devices, num_tasks, name)]

    def _batch(self, name: str, batch: Any) -> Any:
        stream = self.problems[name].stream
        return stream.last() if batch is None and stream is not None else batch

    def _problem(self, name: str) -> Problem:
        if not isinstance(name, str) or name not in self.problems:
            raise ConfigError(
                f"Unknown problem {shown(name)}; expected one of {', '.join(self.problems)}."
                f"{did_you_mean(name, self.problems)} Correct the name."
            )
        return self.problems[name]


def _is_stepwise(problem: Problem, problems: Mapping[str, Problem], graph: Graph) -> bool:
    algorithm = problem.hypergradient
    is_differentiated = algorithm is not None and algorithm.sees_steps and algorithm.horizon != 1
    is_estimated = isinstance(algorithm, AbstractZerothOrder)
    return is_differentiated and not is_estimated and takes_several_steps(problem.name, problems, graph)


def _curvature(problem: Problem) -> str:
    return "total" if problem.hypergradient is None else problem.hypergradient.curvature
