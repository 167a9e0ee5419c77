"""Differentiation through the optimizer's steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mlotool.core.arguments import require_fields
from mlotool.core.errors import ConfigError
from mlotool.core.tracing import is_tracing
from mlotool.hypergradient.functional_steps import batch_gradient, simulate, step_gradients
from mlotool.hypergradient.kept_graphs import UnrolledState, fit
from mlotool.hypergradient.vector import add, leaves, vector_jacobian
from mlotool.problem.interface import AbstractHypergradient, LowerView, Vector
from mlotool.problem.mean_gradient import mean_gradient
from mlotool.problem.pullback import Connected
from mlotool.problem.trajectory import StepRecord
from mlotool.problem.unroll import Unroll
from mlotool.problem.update import State
from mlotool.problem.update_derivative import COUNTER, StepCotangents


@dataclass(frozen=True)
class Unrolled(AbstractHypergradient):
    """Differentiates the steps that led to the current parameters, in reverse (ITD, RMAD; truncated: T1-T2).

        theta_t+1, s_t+1 = update(grad C_l(theta_t, x), theta_t, s_t, h(x)),   theta_0 = theta_0(x)
        from the cotangent of theta_K, for t = K-1, ..., 0: the cotangents of theta_t, s_t and x

    The steps are those that the problem took since a problem above it stepped last, on their own batches, random
    numbers, learning rates and optimizer state. The graph of each step's gradient is kept until the backward pass, or
    the gradient is computed again there (remat), which takes 1.6 to 2 times as long: the memory is then that of one
    step, and the parameters and optimizer state of all. Both ways are the same function, up to rounding, where no
    forward pass reads buffers that move (spectral_norm): a kept graph has those of its step, a step that is computed
    again today's. An upper problem can shape the steps through the loss, through their start (`reset_to`) and through
    the optimizer's hyperparameters (`optimizer.lr`). Solutions that the steps read are taken as they were at each of
    them, and gradients go on through them; then every step is computed again, and the memory is also that of what those
    solutions need (all of their steps, if unrolled).

    Args:
        horizon: how many of the last steps are differentiated (truncation); None takes all.
        remat: compute each step's gradient again in the backward pass; false keeps its graph from the step itself,
            which saves a gradient a step and holds the activations of all steps. "auto" keeps graphs where they fit
            into `graph_budget` and a comparison shows no difference in any bit: the first pullback measures the
            largest graph of a recorded step, times the number of steps, compares its gradient with one without a graph
            and at other buffers (so SiLU, GroupNorm, spectral_norm and BatchNorm in eval mode are computed again), and
            logs which way it chose. Batches are assumed to become no larger afterwards. The choice is kept in
            checkpoints. Steps before it, steps that read solutions, simulated ones and those of a trace keep no graph;
            where steps are traced, nothing is chosen.
        graph_budget: bytes for the graphs of one problem's steps, with `remat: auto`.
        second_order: false takes gradients for constants (first-order MAML, Reptile's relative): what is left are the
            paths through the start, the momentum and the hyperparameters.

    Raises:
        ConfigError: a setting is out of range, or the problem's optimizer is none of SGD, Adam, AdamW.

    Cost: a gradient (none without remat) and a Hessian-vector product a step; `horizon` copies of parameters and
    optimizer state.

    Source: Franceschi et al. 2017 (arXiv 1703.01785), algorithm 1; Shaban et al. 2019 (arXiv 1810.10667).

    Example:
        >>> from mlotool import Unrolled
        >>> Unrolled(horizon=2).horizon
        2
    """

    horizon: int | None = None
    remat: bool | Literal["auto"] = True
    graph_budget: int = 2**30
    second_order: bool = True
    sees_steps = True

    def __post_init__(self) -> None:
        require_fields("hypergradient", self)
        if self.horizon is not None and self.horizon < 1:
            raise ConfigError(
                f"hypergradient.horizon: found {self.horizon!r}; expected a whole number of at least 1, or null "
                "for all steps. Correct hypergradient.horizon."
            )
        if self.graph_budget < 0:
            raise ConfigError(
                f"hypergradient.graph_budget: found {self.graph_budget!r}; expected a number of bytes of at least 0. "
                "Correct hypergradient.graph_budget."
            )

    @property
    def keeps_graphs(self) -> bool:  # type: ignore[override]
        """Whether graphs are kept, whatever they take."""
        return self.remat is False and self.second_order

    def records_graphs(self, state: UnrolledState) -> bool:
        """Return whether the graph of the next step is kept."""
        return self.keeps_graphs or (self.remat == "auto" and state.keeps_graphs is True)

    @property
    def differentiates_twice(self) -> bool:  # type: ignore[override]
        """Whether the gradients of the steps are differentiated."""
        return self.second_order

    def pullback(self, view: LowerView, inputs: Vector) -> "_ReversePass | Connected":
        """Return the reverse pass through the steps that were taken, or those that are taken here."""
        unroll = view.unroll
        assert unroll is not None
        if unroll.records:
            records, theta = unroll.records, view.theta
            if self.remat == "auto" and self.second_order and not (unroll.is_traced or is_tracing()):
                self._decide(unroll, inputs, view)
        elif self.remat is False and view.problem.rank_mean.is_alone and torch.is_grad_enabled():
            return Connected(_connected(self, unroll, inputs, view))
        else:
            records, theta, _ = simulate(unroll, [each.detach() for each in inputs], view)
        return _ReversePass(self, view, unroll, records, theta)

    def _decide(self, unroll: Unroll, inputs: Vector, view: LowerView) -> None:
        """Choose between keeping graphs and computing steps again, at the first pullback through recorded steps."""
        memory = view.problem.memory
        # Steps that read solutions keep no graph.
        if memory.value.keeps_graphs is None and not view.problem.is_nested:
            memory.value = UnrolledState(fit(unroll, inputs, view, self.graph_budget))

    def initial_state(self) -> UnrolledState:
        """Return what is kept before the first pullback."""
        return UnrolledState()

    def state_dict(self, state: UnrolledState) -> dict[str, Any]:
        """Return what the first pullback has decided, where there was one."""
        return {} if state.keeps_graphs is None else {"keeps_graphs": state.keeps_graphs}

    def load_state(self, saved: dict[str, Any]) -> UnrolledState:
        """Return the state that was saved."""
        return UnrolledState(saved.get("keeps_graphs"))


def _connected(algorithm: Unrolled, unroll: Unroll, inputs: Vector, view: LowerView) -> tuple[Tensor, ...]:
    """Take the steps of `unroll.batches` in one graph from the inputs: no node of its own is needed."""
    theta, state = unroll.begin()
    if unroll.start is not None:
        theta = unroll.start(inputs)
    num_steps = len(unroll.batches)
    first = 0 if algorithm.horizon is None else max(0, num_steps - algorithm.horizon)
    for number, (batches, hyperparameters) in enumerate(
        zip(unroll.batches, unroll.hyperparameters(num_steps), strict=True)
    ):
        is_connected = number >= first
        if not is_connected or number == first > 0:
            theta = [tensor.detach() for tensor in theta]
            state = [{key: value.detach() for key, value in each.items()} for each in state]
        # A gradient is taken at an alias: the start may be a view that several parameters share.
        at = [tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_() for tensor in theta]
        create_graph = is_connected and algorithm.second_order
        slopes = [batch_gradient(view, unroll, batch, {}, at, inputs, create_graph=create_graph) for batch in batches]
        gradient = mean_gradient(slopes, at, view.problem.rank_mean)
        with torch.set_grad_enabled(is_connected):
            theta, state = unroll.step(at, gradient, state, hyperparameters, inputs)
    return tuple(theta)


@dataclass
class _ReversePass:
    """The pullback of one solution node."""

    algorithm: Unrolled
    view: LowerView
    unroll: Unroll
    records: tuple[StepRecord, ...]
    outputs: tuple[Tensor, ...]

    @property
    def last_records(self) -> tuple[StepRecord, ...]:
        count = self.algorithm.horizon
        return self.records if count is None else self.records[-count:]

    @property
    def reaches_start(self) -> bool:
        is_whole = self.unroll.has_all and len(self.last_records) == len(self.records)
        return self.unroll.start is not None and is_whole

    def first_order(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the cotangents of the wanted inputs."""
        points = leaves(inputs, tuple(wanted))
        sources = [point for point, flag in zip(points, wanted, strict=True) if flag]
        total = [torch.zeros_like(source) for source in sources]
        adjoint = list(cotangent)
        state_adjoint: list[dict[str, Tensor]] = [{} for _ in adjoint]
        steps = self.last_records
        for number in reversed(range(len(steps))):
            is_last = number == 0 and not self.reaches_start
            adjoint, state_adjoint, found = self._step_back(
                steps[number], points, sources, adjoint, state_adjoint, is_last
            )
            total = add(total, found)
        if self.reaches_start:
            assert self.unroll.start is not None
            with torch.enable_grad():
                start = self.unroll.start(points)
            total = add(total, vector_jacobian(start, sources, adjoint, retain=False))
        return total

    def differentiable(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the same as functions of the inputs: the steps are taken again, in one graph."""
        aliases = [tensor.view_as(tensor) for tensor in inputs]
        steps = self.last_records
        point: Vector = [tensor.detach().requires_grad_() for tensor in steps[0].theta]
        if self.reaches_start:
            assert self.unroll.start is not None
            point = self.unroll.start(aliases)
        state: Sequence[State] = steps[0].state
        for record in steps:
            # A gradient is taken at an alias: the start may be a view that several parameters share.
            at = [tensor.view_as(tensor) for tensor in point]
            gradient = step_gradients(
                self.unroll, record, at, aliases, self.view, create_graph=self.algorithm.second_order
            )
            point, state = self.unroll.step(at, gradient, state, record.hyperparameters, aliases)
        sources = [value for value, flag in zip(aliases, wanted, strict=True) if flag]
        return vector_jacobian(point, sources, cotangent, create_graph=True)

    def _step_back(
        self,
        record: StepRecord,
        points: Vector,
        sources: Vector,
        adjoint: Vector,
        state_adjoint: Sequence[dict[str, Tensor]],
        is_last: bool,
    ) -> tuple[list[Tensor], list[dict[str, Tensor]], list[Tensor]]:
        """Return the cotangents of theta, of the state (none of both where `is_last`) and of the sources."""
        theta, origins = leaves(record.theta), sources
        if record.graph is None:
            mean = step_gradients(
                self.unroll, record, theta, points, self.view, create_graph=self.algorithm.second_order
            )
        else:
            theta, mean = record.graph.theta, record.graph.mean
            origins = [each for each, point in zip(record.graph.inputs, points, strict=True) if point.requires_grad]
        if self.unroll.step_pullback is None:
            found, source_adjoint = self._by_autograd(record, mean, points, sources, adjoint, state_adjoint)
        else:
            found = self.unroll.step_pullback(
                record.theta, mean, record.state, record.hyperparameters, adjoint, state_adjoint
            )
            source_adjoint = [torch.zeros_like(source) for source in sources]
        # The step itself, then the gradient that entered it.
        slope_adjoint = [each for each in found.gradient if each is not None]
        theta_adjoint, held_adjoint = found.theta, found.state
        if self.algorithm.second_order:
            targets = [*origins] if is_last else [*theta, *origins]
            present = [each for each in mean if each is not None]
            through = vector_jacobian(present, targets, slope_adjoint, retain=record.graph is not None)
            if not is_last:
                theta_adjoint = add(theta_adjoint, through[: len(theta)])
                through = through[len(theta) :]
            source_adjoint = add(source_adjoint, through)
        return theta_adjoint, held_adjoint, source_adjoint

    def _by_autograd(
        self,
        record: StepRecord,
        mean: Sequence[Tensor | None],
        points: Vector,
        sources: Vector,
        adjoint: Vector,
        state_adjoint: Sequence[dict[str, Tensor]],
    ) -> tuple[StepCotangents, list[Tensor]]:
        """Return the cotangents of what a step starts from, and those of the sources that shape its settings."""
        gradient = [None if each is None else each.detach().requires_grad_() for each in mean]
        state = [
            {key: value if key == COUNTER else value.detach().requires_grad_() for key, value in each.items()}
            for each in record.state
        ]
        with torch.enable_grad():
            before = leaves(record.theta)
            after, new_state = self.unroll.step(before, gradient, state, record.hyperparameters, points)
        outputs, cotangents = list(after), list(adjoint)
        for each, slope in zip(new_state, state_adjoint, strict=True):
            for key, value in slope.items():
                outputs.append(each[key])
                cotangents.append(value)
        present = [each for each in gradient if each is not None]
        held = [value for each in state for key, value in each.items() if key != COUNTER]
        found = iter(vector_jacobian(outputs, [*before, *present, *held, *sources], cotangents, retain=False))
        step = StepCotangents(
            [next(found) for _ in before],
            [None if each is None else next(found) for each in gradient],
            [{key: next(found) for key in each if key != COUNTER} for each in state],
        )
        return step, list(found)
