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
    """The gradient of a penalised problem at a second lower iterate y, which is kept from pullback to pullback.

    With g the problem's loss, z its parameters (trained on g by its own optimizer), v the cotangent of its solution:

        rule "fixed" (F2SA):
            num_steps times   y <- y - step_size (v / multiplier + dg(x, y)/dy)
            cotangent of x = multiplier (dg(x, y)/dx - dg(x, z)/dx),   multiplier <- multiplier + growth
        rule "barrier" (BOME), with q(x, y) = g(x, y) - g(x, z_T), where z_T are num_steps gradient steps on g from y,
        and a = df/dx the direct part of the upper gradient:
            multiplier = max(barrier - (<a, dq/dx> + <v, dq/dy>) / (||dq/dx||^2 + ||dq/dy||^2), 0)
            cotangent of x = multiplier dq/dx,   y <- y - step_size / max(multiplier, 1) (v + multiplier dq/dy)

    No second derivative is taken, so it is for losses whose double backward fails as well. What the loss takes for a
    constant must stand behind `stop_gradient`: plain `detach` is seen through (a run looks, and warns).

    With y exact for "fixed", `y - z = -H^-1 v / multiplier + O(1/multiplier^2)`: the cotangent is `-M^T H^-1 v` up to
    O(1/multiplier), and exact at any multiplier where g is quadratic in theta and its cross derivative does not depend
    on theta.

    The solution that readers see is z, whereas the papers evaluate the upper loss at y. The node must hand on z: where
    a third problem reads this one it was trained on z, and at another x its own z is off by O(1/multiplier), which its
    multiplier makes an error of O(1). So v is the upper gradient at z, and the upper loss enters the problem for y
    linearised there; the direct part of the upper gradient has no bias.

    Every pullback moves y (one for each problem whose gradient passes through), also that of `Program.gradient`.
    The multiplier amplifies whatever sets the two iterates apart, up to divergence of the upper problem: y should be
    trained as z is (`num_steps` the problem's `unroll_steps`, `step_size` its learning rate), so that both lag behind a
    moving x alike, and the upper learning rate be small where the multiplier is large. In float32 it amplifies the
    rounding of a difference of gradients as well.

    Under "barrier" the multiplier settles while x moves slowly; where g is quadratic, at
    `barrier (||v||^2 + ||p||^2) / <p, p + a>`, with p the hypergradient without its direct part and `p + a` the whole
    one (where the product is not positive, it grows without end). So it grows as the upper problem converges and the
    error of O(1 / multiplier) falls; only until then `barrier` sets it. That takes the direct part in the inner product
    (BOME's), which is one more gradient of the upper loss. BOME steps y by step_size itself, and circles once the
    multiplier is above 2 / (step_size L), L the largest eigenvalue of H; hence the division. What z_T lacks of the
    solution stays: a share (1 - step_size h)^num_steps of the cotangent, h the smallest eigenvalue of H. In logistic
    regression with a learned weight decay the error was 0.6 with 5 steps, at a barrier of 10 and of 100; with 50 steps,
    400 pullbacks at fixed x left 0.02 and 0.003.

    With `tasks` the penalised problem is the mean over tasks of `f_i + multiplier (g_i - min g_i)`, and y has one
    iterate a task: "fixed" equals separate problems. Under "barrier" one multiplier serves all, since the tasks share
    x, and inner products over y are means over tasks.

    Args:
        multiplier: of "fixed": the weight of the lower problem in the penalised one.
        growth: of "fixed": what the multiplier grows by at each pullback.
        num_steps: gradient steps of y, or from y to z_T.
        step_size: of these, in units of the lower problem's learning rate (F2SA's alpha is step_size / multiplier);
            under "barrier" of y as well, divided by the multiplier where that is above 1.
        rule: "fixed" or "barrier".
        barrier: of "barrier": q falls at least at the rate barrier ||dq||^2 (BOME's eta).
        warm_start: false begins with y = z at each pullback, for a problem that begins anew each time (a new task).
        batch: the batch of all evaluations of a pullback: the "last" one the problem trained on, or a "fresh" one.

    Raises:
        ConfigError: a setting is out of range, or does not belong to the rule.

    Cost: num_steps + 2 gradients, under "barrier" num_steps + 1 and one of the upper loss; a copy of the parameters.

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
        """Return the gradient of the penalty, in the place of a pullback."""
        return _PenaltyPullback(self, view)

    def initial_state(self) -> dict[str, Any]:
        """Return what is kept: by reader the point y and the next multiplier of the fixed rule; the last multiplier."""
        return {"readers": {}, "last_multiplier": None}

    def statistics(self, state: Mapping[str, Any]) -> dict[str, float]:
        """Return the multiplier of the last pullback."""
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
        # Where q is stationary the rule has no value, and nothing to penalise.
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
        """Return dg/dtheta, one tensor a parameter, and dg/dx, one a wanted input: one or both, from one evaluation."""

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
