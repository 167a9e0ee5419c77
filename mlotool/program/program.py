"""Problems and their graph as one differentiable object."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.core.suggest import did_you_mean
from mlotool.program.dependence import Dependence, SolutionStep
from mlotool.program.differentiation import LowerLoss, Reduce, Vector, identity_reduce
from mlotool.program.graph import Graph
from mlotool.program.problem import Problem

Scope = dict[str, Mapping[str, Tensor]]
"""By problem, the tensors that take its parameters' places in one evaluation."""


class Program:
    """Optimization problems that shape and read each other.

    A lower problem's solution enters the losses above it as ordinary tensors with a backward of their own, so the
    total gradient of problem k is `torch.autograd.grad(C_k, theta_k)`: PyTorch adds up the cotangents of all paths
    and calls each pullback once. The cost is linear in the edges.

    Args:
        problems: the problems, in the order in which they are reported.
        graph: the edges between them.
        reduce: a mean over ranks of a list of tensors; None in one process.

    Attributes:
        loss_context: makes a context that is entered around every loss (autocast, say).

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
        problems = list(problems)
        self.problems: dict[str, Problem] = {problem.name: problem for problem in problems}
        if len(self.problems) < len(problems):
            names = [problem.name for problem in problems]
            raise ConfigError(f"problems: found the names {names}; expected each once. Rename one of the problems.")
        self.graph = graph
        self.reduce = reduce or identity_reduce
        self.loss_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        graph.validate({name: problem.node for name, problem in self.problems.items()})
        partial = [name for name, each in self.problems.items() if _curvature(each) == "partial"]
        self._dependence = Dependence(graph, partial)
        self._steps = {name: self._dependence.steps_of(name) for name in self.problems}
        self._partial = frozenset(partial)
        self._check_algorithms()

    def loss(self, name: str, batch: Any = None) -> LossOutput:
        """Return the loss of problem `name` at the current parameters, without a graph; nothing is updated.

        Args:
            name: the problem.
            batch: its batch; None takes its stream's last one.
        """
        problem = self._problem(name)
        with torch.no_grad():
            return self._evaluate(name, {name: problem.constants()}, self._batch(name, batch), steps=())

    def gradient(self, name: str, batches: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the TOTAL gradient of problem `name`; nothing is updated.

        `dC_k/dtheta_k = partial C_k/partial theta_k + sum over read solutions of (dtheta*_l/dtheta_k)^T
        partial C_k/partial theta*_l`, at the current parameters of all problems.

        Args:
            name: the problem.
            batches: batches by problem; others use the last batch of their stream.

        Returns:
            A tensor of each parameter's shape by parameter name; zeros where the loss does not depend on it.
        """
        problem = self._problem(name)
        for other in batches or {}:
            self._problem(other)
        given = dict(batches or {})
        output = self._evaluate(name, {name: problem.theta}, self._batch(name, given.get(name)), batches=given)
        gradient = self.differentiate(name, output.loss)
        return {
            key: torch.zeros_like(tensor) if value is None else value
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
        if problem.hypergradient is None:
            raise ConfigError(_MISSING_HYPERGRADIENT.format(name=name))
        scope: Scope = {other: each.theta for other, each in self.problems.items()}
        self._add_solutions(scope, self._dependence.steps_to(name), {})
        return dict(scope[name])

    def live_loss(self, name: str, batch: Any) -> LossOutput:
        """Return the loss of problem `name` for a training step: its own buffers move, the graph is kept."""
        return self._evaluate(name, {name: self.problems[name].theta}, batch, is_live=True)

    def differentiate(self, name: str, loss: Tensor) -> list[Tensor | None]:
        """Return the mean over ranks of the gradient of `loss` with respect to theta of problem `name`."""
        parameters = list(self.problems[name].theta.values())
        if not loss.requires_grad:
            raise ConfigError(
                f"problems.{name}.loss: the loss does not depend on any parameter of '{name}'; expected that it does. "
                f"Give it a role that plays '{name}', or an edge through which '{name}' shapes what it reads; with "
                "the first_order hypergradient nothing passes through a solution."
            )
        gradient = torch.autograd.grad(loss, parameters, allow_unused=True)
        # What is unused stays None, on all ranks alike: an optimizer then leaves it alone.
        reduced = iter(self.reduce([tensor for tensor in gradient if tensor is not None]))
        return [None if tensor is None else next(reduced) for tensor in gradient]

    def statistics(self) -> dict[str, float]:
        """Return what the hypergradients report about their last pullback, as `<problem>/<name>`."""
        return {
            f"{name}/{key}": value
            for name, problem in self.problems.items()
            if problem.hypergradient is not None
            for key, value in problem.hypergradient.statistics().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all problems, in plain containers."""
        return {name: problem.state_dict() for name, problem in self.problems.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state back."""
        if set(state) != set(self.problems):
            raise ConfigError(
                f"A saved program has the problems {sorted(state)}; expected {sorted(self.problems)}. "
                "Load it with the recipe it was saved by."
            )
        for name, problem in self.problems.items():
            problem.load_state_dict(state[name])

    def _evaluate(
        self,
        name: str,
        given: Scope,
        batch: Any,
        *,
        steps: Sequence[SolutionStep] | None = None,
        batches: Mapping[str, Any] | None = None,
        is_live: bool = False,
    ) -> LossOutput:
        """Return the loss of `name` with the tensors of `given` in their places.

        Args:
            name: the problem.
            given: tensors by problem; those that are missing and are no solution are constants.
            batch: the problem's batch.
            steps: the solution nodes to make; None takes those of its total gradient.
            batches: batches of the lower problems, where they are not their streams' last ones.
            is_live: run the problem's module itself, so that its buffers move.
        """
        problem = self.problems[name]
        scope = dict(given)
        self._add_solutions(scope, self._steps[name] if steps is None else steps, batches or {})
        roles = {}
        for role, player in problem.roles.items():
            other = self.problems[player.problem]
            live = is_live and player.problem == name
            tensors = None if live else scope.get(player.problem) or other.constants()
            roles[role] = BoundModule(other.module, tensors, training=player.training, places=other.places)
        with self.loss_context():
            return LossOutput.of(problem.loss(batch, **roles))

    def _add_solutions(self, scope: Scope, steps: Sequence[SolutionStep], batches: Mapping[str, Any]) -> None:
        for step in steps:
            lower = self.problems[step.problem]
            inputs: Scope = {}
            for other in step.inputs:
                tensors = scope.get(other) or self.problems[other].constants()
                if other in step.constants:
                    tensors = {key: tensor.detach() for key, tensor in tensors.items()}
                inputs[other] = tensors
            flat = [tensor for tensors in inputs.values() for tensor in tensors.values()]
            if not any(tensor.requires_grad for tensor in flat):
                scope[step.problem] = lower.constants()
                continue
            assert lower.hypergradient is not None
            solution = lower.hypergradient.solution(self._lower_loss(lower, inputs, batches), flat)
            scope[step.problem] = dict(zip(lower.theta, solution, strict=True))

    def _lower_loss(self, lower: Problem, inputs: Scope, batches: Mapping[str, Any]) -> LowerLoss:
        keys = {other: tuple(tensors) for other, tensors in inputs.items()}
        batch = batches.get(lower.name)
        if batch is None and lower.stream is not None:
            batch = lower.stream.peek() if _batch_rule(lower) == "fresh" else lower.stream.last()
        steps = () if lower.name in self._partial else self._steps[lower.name]

        def function(theta: Vector, flat: Vector) -> Tensor:
            values = iter(flat)
            given: Scope = {other: {key: next(values) for key in names} for other, names in keys.items()}
            given[lower.name] = dict(zip(lower.theta, theta, strict=True))
            return self._evaluate(lower.name, given, batch, steps=steps, batches=batches).loss

        theta = tuple(tensor.detach() for tensor in lower.theta.values())
        return LowerLoss(lower.name, theta, function, is_nested=bool(steps), reduce=self.reduce)

    def _batch(self, name: str, batch: Any) -> Any:
        stream = self.problems[name].stream
        return stream.last() if batch is None and stream is not None else batch

    def _problem(self, name: str) -> Problem:
        if name not in self.problems:
            raise ConfigError(
                f"Unknown problem '{name}'; expected one of {', '.join(self.problems)}."
                f"{did_you_mean(name, self.problems)} Correct the name."
            )
        return self.problems[name]

    def _check_algorithms(self) -> None:
        differentiated = {
            step.problem
            for steps in self._steps.values()
            for upper in steps
            if upper.problem not in self._partial
            for step in self._steps[upper.problem]
        }
        for name in {step.problem: None for steps in self._steps.values() for step in steps}:
            algorithm = self.problems[name].hypergradient
            if algorithm is None:
                raise ConfigError(_MISSING_HYPERGRADIENT.format(name=name))
            is_nested = name not in self._partial and bool(self._steps[name])
            algorithm.check(name, is_nested=is_nested, is_differentiated=name in differentiated)


_MISSING_HYPERGRADIENT = (
    "problems.{name}.hypergradient: nothing is set, but a gradient has to pass through the solution of '{name}'; "
    "expected an algorithm. Write hypergradient: finite_difference in the recipe's defaults, or pass "
    "hypergradient=Implicit(Identity()) to Problem('{name}', ...)."
)


def _curvature(problem: Problem) -> str:
    return "total" if problem.hypergradient is None else problem.hypergradient.curvature


def _batch_rule(problem: Problem) -> str:
    return "last" if problem.hypergradient is None else problem.hypergradient.batch
