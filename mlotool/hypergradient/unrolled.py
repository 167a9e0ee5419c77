"""Differentiation through the optimizer's steps."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mlotool.core.arguments import require_fields
from mlotool.core.errors import ConfigError
from mlotool.core.tangents import in_dual_level
from mlotool.core.tracing import is_tracing
from mlotool.hypergradient.functional_steps import batch_gradient, simulate
from mlotool.hypergradient.kept_graphs import UnrolledState, fit
from mlotool.hypergradient.product_choice import chosen_product, takes_forward
from mlotool.hypergradient.step_products import (
    AbstractStepProduct,
    FirstOrderStep,
    ForwardStepProduct,
    ReverseStepProduct,
)
from mlotool.hypergradient.stored_steps import StoredSteps
from mlotool.hypergradient.unrolled_pass import ReversePass
from mlotool.problem.interface import AbstractHypergradient, Connected, LowerView, Unroll, Vector
from mlotool.problem.rank_mean import mean_gradient
from mlotool.problem.step_store import AbstractStepStore, KeepAll


@dataclass(frozen=True)
class Unrolled(AbstractHypergradient):
    """Differentiates the steps that led to the current parameters, in reverse (ITD, RMAD; truncated: T1-T2).

        theta_t+1, s_t+1 = update(grad C_l(theta_t, x), theta_t, s_t, h(x)),   theta_0 = theta_0(x)
        from the cotangent of theta_K, for t = K-1, ..., 0: the cotangents of theta_t, s_t and x

    The steps are those that the problem took since a problem above it stepped last, on their own batches, random
    numbers, learning rates and optimizer state. The graph of each step's gradient is kept until the backward pass, or
    the gradient is computed again there (remat), which takes 1.6 to 2 times as long: the memory is then that of one
    step, and the parameters and optimizer state of all. Both ways are the same function, up to rounding; a step that is
    computed again has the buffers of its module as they were. In the first unroll, the second, the fourth and so on its
    gradient is compared with the one that was taken, which finds losses that are no functions, unless the loss reads
    solutions. An upper problem can shape the steps through the loss, through their start (`reset_to`) and through the
    optimizer's hyperparameters (`optimizer.lr`). Solutions that the steps read are taken as they were at each of them,
    and gradients go on through them; then every step is computed again, and the memory is also that of what those
    solutions need (all of their steps, if unrolled).

    Args:
        horizon: how many of the last steps are differentiated (truncation); None takes all.
        remat: compute each step's gradient again in the backward pass; false keeps its graph from the step itself,
            which saves a gradient a step and holds the activations of all steps. "auto" keeps graphs where they fit
            into `graph_budget` and a comparison shows no difference in any bit: the first pullback measures the largest
            graph of a recorded step, times the number of steps, compares its gradient with one without a graph and at
            other buffers, where these have not moved (so SiLU, GroupNorm and BatchNorm in eval mode are computed
            again), and logs which way it chose. Batches are assumed to become no larger afterwards. The choice is kept
            in checkpoints. Steps before it, steps that read solutions, simulated ones and those of a trace keep no
            graph; where steps are traced, nothing is chosen.
        graph_budget: bytes for the graphs of one problem's steps, with `remat: auto`.
        second_order: false takes gradients for constants (first-order MAML, Reptile's relative): what is left are the
            paths through the start, the momentum and the hyperparameters.
        product: how a step's gradient is differentiated: "reverse" (double backward) or "forward" (forward mode over
            reverse mode: no graph of the gradient, so the memory of one step is about that of its own gradient with
            tangents; each record then holds the step's gradient too), both exact; "auto" is "forward" where blocks of
            the problem's module are evaluated again (its own `remat`), and "reverse" elsewhere.
        trajectory: what is kept of the steps until they are differentiated: `KeepAll`, `KeepEvery` (parameters and
            optimizer state of every k-th step, gradients of all) or `Binomial` (a few checkpoints, whatever the
            number of steps). What is not kept is computed again, to the bit.

    Raises:
        ConfigError: a setting is out of range, the problem's optimizer is none of SGD, Adam, AdamW, or a step that is
            computed again has another gradient than it had.

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
    product: Literal["reverse", "forward", "auto"] = "reverse"
    trajectory: AbstractStepStore = field(default_factory=KeepAll)
    sees_steps = True

    def __post_init__(self) -> None:
        require_fields("hypergradient", self)
        if self.horizon is not None and self.horizon < 1:
            raise ConfigError(
                f"hypergradient.horizon: found {self.horizon!r}; expected a whole number of at least 1, or null "
                "for all steps. Correct hypergradient.horizon."
            )
        if self.product == "forward" and self.remat is not True:
            raise ConfigError(
                f"hypergradient.remat: found {self.remat!r} with product: forward; expected true, since forward mode "
                "keeps no graph of a step. Set hypergradient.remat=true, or hypergradient.product=reverse."
            )
        if not self.trajectory.is_whole and self.remat is not True:
            raise ConfigError(
                f"hypergradient.remat: found {self.remat!r} with a trajectory that does not keep all steps; expected "
                "true: the graph of a step holds its parameters. Set hypergradient.remat=true."
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

    def saves_gradients(self, prefers_forward: bool) -> bool:
        """Return whether the gradient of a step is kept: forward mode gives it after the step's own derivative."""
        is_forward = takes_forward(self._setting, prefers_forward, is_nested=False)
        return (is_forward and self.trajectory.is_whole) or self.trajectory.saves_gradients

    @property
    def is_traceable(self) -> bool:  # type: ignore[override]
        """Unless forward mode is tried, which compares values."""
        return self.product == "reverse"

    @property
    def pushes_solutions(self) -> bool:  # type: ignore[override]
        """Whether the steps are differentiated along directions."""
        return self.product == "forward" and self.second_order

    def pullback(self, view: LowerView, inputs: Vector) -> "ReversePass | Connected":
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
            still = [each.detach() for each in inputs]
            problem = view.problem
            prefers_forward = problem.has_blocks and not problem.is_nested and not problem.traits.lacks_tangents
            keeps_gradients = self.saves_gradients(prefers_forward)
            records, theta, _ = simulate(unroll, still, view, keeps_gradients=keeps_gradients)
        taken = replace(unroll, records=records)
        first = 0 if self.horizon is None else max(0, len(records) - self.horizon)
        steps = StoredSteps(self.trajectory, taken, view, inputs)
        kind = self._product(steps, view, inputs)
        return ReversePass(kind, self.second_order, view, taken, steps, first, unroll.has_all and first == 0, theta)

    @property
    def _setting(self) -> str:
        """How gradients are differentiated; graphs that are kept are those of double backward."""
        return "reverse" if self.remat is not True or not self.second_order else self.product

    def _product(self, steps: StoredSteps, view: LowerView, inputs: Vector) -> type[AbstractStepProduct]:
        if not self.second_order:
            return FirstOrderStep
        if not takes_forward(self._setting, view.problem.has_blocks, view.problem.is_nested):
            return ReverseStepProduct
        if view.problem.traits.has_compared_forward or in_dual_level():
            kind = chosen_product(self._setting, view, view.theta, inputs, ())
        else:
            there, as_then = steps.last()
            with as_then:
                kind = chosen_product(self._setting, there, there.theta, inputs, [True] * len(inputs))
        return ForwardStepProduct if kind == "forward" else ReverseStepProduct

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
