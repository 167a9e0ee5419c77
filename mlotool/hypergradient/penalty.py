"""Value-function methods: a penalty on the lower problem's suboptimality, by gradients alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.gradient import slopes_of
from mlotool.core.replay import RandomState, Replay
from mlotool.core.settings import NonNegative, Positive, Rounds, target
from mlotool.hypergradient.products.finite_difference import warn_of_differences
from mlotool.hypergradient.vector import add, chosen, constants, copies, dot, is_finite, leaves, moved_to, scaled
from mlotool.problem.interface import AbstractHypergradient, LowerView, Vector


@target("hypergradient")
@dataclass(frozen=True)
class Penalty(AbstractHypergradient):
    """Penalty (value-function) methods: first-order hypergradients from a second copy y of the lower parameters.

    With g the problem's loss, z its parameters (trained on g by the problem's own optimizer), x the parameters of the
    problems above, f the upper loss, and v the derivative of f with respect to the solution:

        rule "fixed" (F2SA):
            num_steps times   y <- y - step_size (v / multiplier + dg(x, y)/dy)
            gradient of x = multiplier (dg(x, y)/dx - dg(x, z)/dx),   multiplier <- multiplier + growth
        rule "barrier" (BOME), with q(x, y) = g(x, y) - g(x, z_T), where z_T are num_steps gradient steps on g from y,
        and a = df/dx the direct part of the upper gradient:
            multiplier = max(barrier - (<a, dq/dx> + <v, dq/dy>) / (||dq/dx||^2 + ||dq/dy||^2), 0)
            gradient of x = multiplier dq/dx,   y <- y - step_size / max(multiplier, 1) (v + multiplier dq/dy)

    No second derivative is taken, so this also works for losses whose double backward fails. Mark what the loss treats
    as a constant by `stop_gradient`: plain `detach` has no effect here (a run looks for this, and warns).

    Rule "fixed": with an exact y, `y - z = -H^-1 v / multiplier + O(1/multiplier^2)`, so the gradient is `-M^T H^-1 v`
    up to O(1/multiplier). It is exact at any multiplier if g is quadratic in its parameters, and its mixed derivative
    with x does not depend on them.

    Upper losses are evaluated at z, whereas the papers evaluate them at y. This is needed if a third problem also reads
    this one: that problem was trained on z, and an error of O(1/multiplier) in z would become an error of O(1) in its
    own hypergradient. So v is the upper gradient at z, and y minimizes g plus the upper loss linearized at z. The
    direct part of the upper gradient has no bias.

    Each hypergradient, also that of `Program.gradient`, moves y, of which each problem above has its own. The
    multiplier amplifies every difference between the two iterates, which can make the upper problem diverge. So train y
    as z is trained (`num_steps` equal to the problem's `unroll_steps`, `step_size` to its learning rate), so that both
    lag behind a moving x by the same amount, and use a small upper learning rate with a large multiplier. In float32,
    the multiplier also amplifies the rounding error of the difference of gradients.

    Rule "barrier": while x moves slowly, the multiplier settles; for a quadratic g at
    `barrier (||v||^2 + ||p||^2) / <p, p + a>`, where p is the indirect part of the hypergradient and `p + a` the whole
    hypergradient (it grows without bound if the inner product is not positive). So the multiplier grows as the upper
    problem converges, and the error of O(1/multiplier) falls. The inner product with `a`, as in BOME, takes one more
    gradient of the upper loss. The step of y is divided by the multiplier, unlike in BOME, since it would oscillate for
    a multiplier above 2 / (step_size L), with L the largest eigenvalue of H. One error remains: z_T is not the
    solution, which costs a share (1 - step_size h)^num_steps of the gradient, with h the smallest eigenvalue of H. In
    logistic regression with a learned weight decay, the relative error was 0.6 with 5 steps, at a barrier of 10 and of
    100. With 50 steps, it was 0.02 and 0.003 after 400 hypergradients at fixed x.

    With `tasks`, the penalized problem is the mean over tasks of `f_i + multiplier (g_i - min g_i)`, and y has one
    iterate per task. Rule "fixed" then equals separate problems. Rule "barrier" has one multiplier for all tasks, since
    they share x, and inner products over y are means over tasks.

    Args:
        multiplier: for "fixed", the weight of the lower problem in the penalized problem.
        growth: for "fixed", the number by which the multiplier grows at each hypergradient.
        num_steps: number of gradient steps of y, or from y to z_T.
        step_size: step size of these steps. It corresponds to the lower problem's learning rate; F2SA's alpha is
            step_size / multiplier. For "barrier" also the step size of y, which is divided by the multiplier if that is
            above 1.
        rule: "fixed" or "barrier".
        barrier: for "barrier", q falls at least at the rate barrier ||dq||^2 (BOME's eta).
        warm_start: false begins with y = z at each hypergradient, for a problem that begins anew each time (as with a
            new task).
        batch: the batch of all evaluations of a hypergradient: the "last" one that the problem trained on, or a "fresh"
            one.

    Raises:
        ConfigError: a setting is out of range, or does not belong to the rule.

    Cost: num_steps + 2 gradients; for "barrier" num_steps + 1 gradients and one of the upper loss; memory of a copy of
    the parameters.

    Source: Kwon et al. 2023 (arXiv 2301.10945), algorithm 1; Ye et al. 2022 (arXiv 2209.08709), algorithm 1.

    Example:
        >>> from mlotool import Penalty
        >>> Penalty(multiplier=100.0, num_steps=5, step_size=0.1).rule
        'fixed'
        >>> Penalty(rule="barrier", barrier=0.5, num_steps=10, step_size=0.1).multiplier is None
        True
    """

    multiplier: Positive | None = None
    growth: NonNegative = 0.0
    num_steps: Rounds = 1
    step_size: Positive = 0.1
    rule: Literal["fixed", "barrier"] = "fixed"
    barrier: Positive | None = None
    warm_start: bool = True
    batch: Literal["last", "fresh"] = "last"
    needs_full_precision = True

    def __post_init__(self) -> None:
        is_fixed = self.rule == "fixed"
        own, other = ("multiplier", "barrier") if is_fixed else ("barrier", "multiplier")
        for key, is_right, expected in (
            (own, getattr(self, own) is not None, f"a positive number with rule: {self.rule}"),
            (other, getattr(self, other) is None, f"null with rule: {self.rule}, which does not use it"),
            ("growth", is_fixed or not self.growth, "0 with rule: barrier, which sets its own multiplier"),
        ):
            require(is_right, f"hypergradient.{key}", getattr(self, key), expected)

    def pullback(self, view: LowerView, inputs: Vector) -> "_PenaltyPullback":
        """Return the backward pass through the solution, by the gradient of the penalty."""
        return _PenaltyPullback(self, view)

    def initial_state(self) -> dict[str, Any]:
        """Return the initial state: per problem above, y and the next multiplier of "fixed"; the last multiplier."""
        return {"readers": {}, "last_multiplier": None}

    def statistics(self, state: Mapping[str, Any]) -> dict[str, float]:
        """Return the multiplier of the last hypergradient."""
        last = state["last_multiplier"]
        return {} if last is None else {"penalty_multiplier": float(last)}

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state, which is plain."""
        return {**state, "last_multiplier": next(iter(self.statistics(state).values()), None)}

    def load_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the state that was saved."""
        return saved


class _PenaltyPullback:
    """The pullback of one solution node; its evaluations share batch, random numbers and constants."""

    def __init__(self, settings: Penalty, view: LowerView) -> None:
        self.settings = settings
        self.view = view
        self.outputs = view.theta

    def first_order(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the cotangents of the wanted inputs, and move y."""
        settings, problem = self.settings, self.view.problem
        state = problem.memory.value
        before = state["readers"].get(problem.reader)
        multiplier = settings.multiplier if before is None else before["multiplier"]
        point: Vector = theta
        if settings.warm_start and before is not None:
            point = moved_to(before["point"], theta)
        warn_of_differences(self.view, theta, inputs, wanted, cotangent)
        slopes = _Slopes(self.view, theta, inputs, wanted)
        vector = list(cotangent)
        if settings.rule == "fixed":
            assert multiplier is not None
            last: float | Tensor = multiplier
            pulled, point = self._fixed(slopes, point, theta, vector, multiplier)
            multiplier += settings.growth
        else:
            pulled, point, last = self._barrier(slopes, point, vector)
        # A y that is not finite would stay so for ever.
        readers = state["readers"]
        if is_finite(point):
            readers = {**readers, problem.reader: {"point": copies(point), "multiplier": multiplier}}
        problem.memory.value = {"readers": readers, "last_multiplier": last}
        return pulled

    def differentiable(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Not called: `check` refuses the graphs that would."""
        raise AssertionError("A penalty's pullback has no derivative.")

    def _fixed(
        self, slopes: "_Slopes", point: Vector, theta: Vector, vector: Vector, multiplier: float
    ) -> tuple[list[Tensor], Vector]:
        scale = self.view.problem.cotangent_scale
        pull = scaled(vector, scale / multiplier)
        for _ in range(self.settings.num_steps):
            point = add(point, add(pull, slopes.mean(point, theta=True)), -self.settings.step_size)
        difference = add(slopes.own(point), slopes.own(theta), -1.0)
        return scaled(difference, multiplier / scale), point

    def _barrier(self, slopes: "_Slopes", point: Vector, vector: Vector) -> tuple[list[Tensor], Vector, Tensor]:
        assert self.settings.barrier is not None
        scale, step_size = self.view.problem.cotangent_scale, self.settings.step_size
        # z_T is a constant in dq, so dq/dy = dg(x, y)/dy.
        both = slopes.mean(point, theta=True, inputs=True)
        slope, upper = both[: len(point)], both[len(point) :]
        solved = add(point, slope, -step_size)
        for _ in range(self.settings.num_steps - 1):
            solved = add(solved, slopes.mean(solved, theta=True), -step_size)
        shift = scaled(add(upper, slopes.mean(solved, inputs=True), -1.0), 1 / scale)
        product = dot(vector, slope) + dot(slopes.direct(), shift)
        square = dot(slope, slope) / scale + dot(shift, shift)
        # Where q is stationary the rule has no value, and nothing to penalize.
        is_stationary = square == 0
        ratio = product / torch.where(is_stationary, 1.0, square)
        multiplier = torch.where(is_stationary, 0.0, (self.settings.barrier - ratio).clamp_min(0.0))
        pull = add(scaled(vector, scale), scaled(slope, multiplier))
        # A step along lambda dq/dy is stable up to lambda step_size L = 2.
        return scaled(shift, multiplier), add(point, pull, -step_size / multiplier.clamp_min(1.0)), multiplier


class _Slopes:
    """First derivatives of one lower loss at several points."""

    def __init__(self, view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> None:
        self._loss = view
        self._inputs, self._wanted = constants(inputs), tuple(wanted)
        base, values = constants(theta), self._inputs
        self._replay = Replay(lambda: [view.own_loss(base, values)], view.devices, view.problem.traits)

    def mean(self, point: Vector, *, theta: bool = False, inputs: bool = False) -> list[Tensor]:
        """Return dg/dtheta, a tensor per parameter, or dg/dx, one per wanted input, or both, from one evaluation."""

        def evaluate() -> Sequence[Tensor]:
            at = leaves(point, [theta] * len(point))
            values, sources = self._sources() if inputs else (self._inputs, [])
            return self._loss.slopes(at, values, [*at, *sources] if theta else sources)

        return list(self._replay(evaluate))

    def own(self, point: Vector) -> list[Tensor]:
        """Return dg/dx on this rank's part of the batch, to be handed on as a part of a gradient."""

        def evaluate() -> Sequence[Tensor]:
            values, sources = self._sources()
            with torch.enable_grad():
                return slopes_of(self._loss.own_loss(point, values), sources)

        return list(self._replay(evaluate))

    def direct(self) -> list[Tensor]:
        """Return the derivative of the reader's loss with respect to the wanted inputs, all solutions fixed."""
        values, sources = self._sources()
        with RandomState(self._loss.devices).replayed():
            return self._loss.reader_slopes(values, sources)

    def _sources(self) -> tuple[list[Tensor], list[Tensor]]:
        values = leaves(self._inputs, self._wanted)
        return values, chosen(values, self._wanted)
