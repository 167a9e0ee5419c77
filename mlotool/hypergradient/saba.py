"""SABA: each pullback takes one step on the linear system, with products that SAGA averages over the batches."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import is_whole, require
from mlotool.core.errors import ConfigError
from mlotool.core.settings import Positive, target
from mlotool.hypergradient.products.base import ReverseProduct
from mlotool.hypergradient.vector import add, copies, is_finite, moved_to, scaled, zeros
from mlotool.problem.interface import AbstractDirector, LowerView, Memory, Vector


@target("hypergradient")
@dataclass(frozen=True)
class SABA(AbstractDirector):
    """SABA: one step on the linear system `H q = v` per hypergradient, with variance reduction over the batches (SAGA).

        for batch i, with q kept from one hypergradient to the next, and mean_j over the batches that were seen so far:
        h = H_i q,   h^ = h - h_i + mean_j h_j,   h_i <- h,   q <- q - step_size (h^ - v)
        c = M_i^T q, c^ = c - c_i + mean_j c_j,   c_i <- c,   gradient with respect to x = -c^
        and in each of the problem's own steps, with g = dC_i/dtheta:
        g^ = g - g_i + mean_j g_j,   g_i <- g,   the optimizer steps along g^

    theta are the problem's parameters, C is its loss, x are the parameters of the problems above, and v is the
    derivative of the upper loss with respect to the solution. When a batch is seen for the first time, `h^ = h`.

    Each hypergradient uses one batch. Yet at fixed x, theta and v, q and the gradient converge linearly to those over
    all batches. While x and theta move, the noise is proportional to how fast they move, so that they converge to the
    exact solution with steps of constant size. This needs a fixed partition of the data into batches: a stream with
    `shuffle: false`, or batches that carry their number (`key`). Random transforms of samples are averaged as if they
    did not change. All batches have the same weight, whatever their size.

    The paper computes the directions of theta, q and x at the old values of all three. Here theta steps first, as in
    any tick; then q steps at the new theta, and the gradient of x uses the new q and theta. The fixed point and the
    cost are the same, the iterates are not.

    The variance due to the upper problem's batches remains, in v and in the direct part of the upper gradient. There is
    none if the upper loss is evaluated on all its data.

    Each hypergradient, also that of `Program.gradient`, updates q and the tables, of which each problem above has its
    own. With `tasks`, each task has its own q, and a batch holds the data of all tasks. A position on the task axis has
    to be the same task in all batches; if tasks change, choose an implicit method.

    Args:
        step_size: step size on the linear system; below 1 / (largest eigenvalue of H on a batch).
        key: the batch's entry with the batch's number: a whole number, or a tensor all of whose elements are that
            number. None takes the batch's position in its stream.
        average_gradient: whether the problem's own steps are averaged too (the last line of the equations). false steps
            along the batch's gradient, for a problem whose parameters move far between two visits to a batch.

    Raises:
        ConfigError: the step size is not positive; the stream shuffles; or hypergradients see only some of the batches.

    Cost: per hypergradient, one Hessian-vector product and one product with M^T; memory of (number of batches + 1)
    (2 p + n) + p numbers for p parameters and n numbers in x, or (number of batches + 1) (p + n) + p numbers without
    `average_gradient`.

    Source: Dagreou et al. 2022 (arXiv 2201.13409), algorithm 1 and section 3.2.

    Example:
        >>> from mlotool import SABA
        >>> SABA(step_size=0.1).key is None
        True
    """

    step_size: Positive
    key: str | None = None
    average_gradient: bool = True

    def pullback(self, view: LowerView, inputs: Vector) -> "_AveragedPullback":
        """Return the backward pass through the solution, by averaged products."""
        return _AveragedPullback(self, view)

    def check_batches(self, problem: str, stream: Any, num_draws: int) -> None:
        """Refuse a stream that shuffles, or of which hypergradients would never see some batches."""
        if stream is None or self.key is not None:
            return
        if getattr(stream, "last_number", None) is None:
            raise ConfigError(_NO_PARTITION.format(problem=problem))
        if hasattr(stream, "num_seen_every"):
            num_seen, expected = stream.num_seen_every(num_draws), f"all {stream.num_batches} of an epoch"
            advice = (
                f"Hypergradients see one of {num_draws} batches (unroll_steps x accumulate_batches): choose batch_size "
                "or unroll_steps so that this number and the number of batches have no common divisor."
            )
            is_all = num_seen >= stream.num_batches
            require(is_all, f"problems.{problem}.stream: batches that hypergradients see", num_seen, expected, advice)

    def step_direction(
        self,
        problem: str,
        theta: Vector,
        gradient: Sequence[Tensor | None],
        batch: Any,
        batch_number: int | None,
        memory: Memory,
    ) -> list[Tensor | None]:
        """Return the averaged gradient; None for a parameter that no batch has used."""
        if not self.average_gradient:
            return list(gradient)
        state = memory.value
        before = state["is_used"] or [False] * len(gradient)
        is_used = [was or value is not None for was, value in zip(before, gradient, strict=True)]
        number = number_of(problem, batch, batch_number, self.key)
        present = [torch.zeros_like(x) if value is None else value for x, value in zip(theta, gradient, strict=True)]
        averaged, gradients = replaced(state["gradients"], number, present)
        # In a table a NaN would stay for ever: its sum goes on by differences.
        if is_finite(averaged):
            memory.value = {**state, "gradients": gradients, "is_used": is_used}
        return [value if used else None for value, used in zip(averaged, is_used, strict=True)]

    def initial_state(self) -> dict[str, Any]:
        """Return the initial state: q and the tables of both products per problem above, and the table of gradients."""
        return {"readers": {}, "gradients": EMPTY, "is_used": []}

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state, which is plain."""
        return state

    def load_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the state that was saved.

        Raises:
            ConfigError: an earlier version saved it, which kept tables as lists.
        """
        is_table = isinstance(saved["gradients"]["last"], Mapping)
        require(is_table, "state of SABA", "tables of an older version", "tables by batch", "Begin the run anew.")
        return saved


# The last vector of each batch, and their sum, which rounding sets apart from what the vectors add up to again.
Table = Mapping[str, Any]
EMPTY: Table = {"last": {}, "sum": []}


def replaced(table: Table, key: Hashable, vector: Vector) -> tuple[list[Tensor], Table]:
    """Return SAGA's estimate of the mean, and the table with a batch's new vector in the place of its old one.

    Example:
        >>> import torch
        >>> _, table = replaced(EMPTY, 0, [torch.tensor([1.0])])
        >>> _, table = replaced(table, 1, [torch.tensor([3.0])])
        >>> estimate, _ = replaced(table, 0, [torch.tensor([2.0])])  # 2 - 1 + (1 + 3) / 2
        >>> estimate
        [tensor([3.])]
    """
    old, count, new = table["last"].get(key), len(table["last"]), copies(vector)
    last = {**table["last"], key: new}
    total = moved_to(table["sum"], new) if count else zeros(new)
    if old is None:
        return new, {"last": last, "sum": add(total, new)}
    change = add(new, moved_to(old, new), -1.0)
    return add(change, total, 1 / count), {"last": last, "sum": add(total, change)}


class _AveragedPullback:
    """The pullback of one solution node."""

    def __init__(self, settings: SABA, view: LowerView) -> None:
        self.settings = settings
        self.view = view
        self.outputs = view.theta

    def first_order(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the averaged `-M^T q` for the wanted inputs, and move q."""
        loss, problem = self.view, self.view.problem
        number = number_of(problem.name, loss.own_batch, loss.batch_number, self.settings.key)
        state = problem.memory.value
        averages = state["readers"].get(problem.reader)
        if averages is None:
            averages = {"solution": zeros(cotangent), "hessian": EMPTY, "cross": EMPTY}
        product = ReverseProduct(loss, theta, inputs, wanted)
        start = moved_to(averages["solution"], cotangent)
        # Means over ranks, so that the tables are the same on all of them.
        curved, hessian = replaced(averages["hessian"], number, product.hessian(start))
        residual = add(curved, cotangent, -1.0)
        solution = add(start, residual, -self.settings.step_size)
        crossed, cross = replaced(averages["cross"], number, problem.rank_mean.mean(product.cross(solution)))
        if is_finite([*solution, *crossed]):
            kept = {"solution": solution, "hessian": hessian, "cross": cross}
            problem.memory.value = {**state, "readers": {**state["readers"], problem.reader: kept}}
        return scaled(crossed, -1.0)

    def differentiable(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Not called: `check` refuses the graphs that would."""
        raise AssertionError("The pullback from tables has no derivative.")


def number_of(problem: str, batch: Any, batch_number: int | None, key: str | None) -> Hashable:
    """Return what tells a batch from the others.

    Args:
        problem: its problem.
        batch: the batch.
        batch_number: its position in the stream, where every epoch has the same batches; else None.
        key: the entry that numbers it; None takes the position.

    Raises:
        ConfigError: nothing does.

    Example:
        >>> import torch
        >>> number_of("w", {"number": torch.tensor([3])}, None, key="number"), number_of("w", None, 5, key=None)
        (3, 5)
    """
    if key is None:
        if batch_number is None:
            raise ConfigError(_NO_PARTITION.format(problem=problem))
        return batch_number
    value = batch.get(key) if isinstance(batch, Mapping) else None
    numbers: set[Any] = set(value.reshape(-1).tolist()) if isinstance(value, Tensor) else {value}
    expected = "an entry of the batch that holds one whole number, the same in each epoch (and for all tasks)"
    require(len(numbers) == 1 and is_whole(min(numbers)), f"problems.{problem}.hypergradient.key", key, expected)
    return int(numbers.pop())


_NO_PARTITION = (
    "problems.{problem}.hypergradient: found SABA, but the batches of '{problem}' differ from epoch to epoch (or were "
    "given to Program.gradient); expected a fixed partition into batches. Write problems.{problem}.stream.shuffle: "
    "false, or set hypergradient.key to the entry of the batch that has its number."
)
