"""SABA: one step on the linear system a pullback, its products averaged over all batches by SAGA."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.hypergradient.products import ReverseProduct
from mlotool.hypergradient.solution import Solution
from mlotool.hypergradient.vector import add, scaled
from mlotool.program.differentiation import AbstractHypergradient, LowerLoss, Vector


@dataclass
class SABA(AbstractHypergradient):
    """A step on `H q = v` a pullback, with the products of the last visit to each batch (SAGA).

        i the batch, q kept from pullback to pullback, mean_j over the batches that have been met:
        h = H_i q,   h^ = h - h_i + mean_j h_j,   h_i <- h,   q <- q - step_size (h^ - v)
        c = M_i^T q, c^ = c - c_i + mean_j c_j,   c_i <- c,   cotangent of x = -c^

    Each pullback sees one batch, but at fixed x, theta and v, q converges linearly to the solution over all batches and
    the cotangent to the one over all batches; where they move, the noise falls with how fast they do. At its first
    visit a batch counts as itself (`h^ = h`). It needs a fixed partition of the data into batches: a stream with
    `shuffle: false`, or a batch that says which one it is (`key`). Random transforms of the samples are averaged as if
    they did not change, and batches count alike, whatever their size.

    The variance of v (that of the upper batch) stays, and that of the lower problem's own gradient: the optimizer takes
    the gradient of one batch, and a table for it would need the place of the optimizer.

    Every pullback moves q and the tables (one set for each problem whose gradient passes through), also that of
    `Program.gradient`.

    Args:
        step_size: of the step on the linear system; below 1 / (largest eigenvalue of a batch's H).
        key: entry of the batch that numbers it: a whole number, or a tensor whose elements all are that number. None
            takes the batch's position in its stream.

    Raises:
        ConfigError: the step size is not positive; the stream shuffles, or gives pullbacks some of the batches only.

    Cost: a Hessian-vector and a cross product; memory of q and, for each batch, of one vector of the parameters' size
    and one of the inputs' size: (number of batches + 2) (p + n) numbers.

    Source: Dagreou et al. 2022 (arXiv 2201.13409), algorithm 1 and section 3.2.

    Example:
        >>> from mlotool import SABA
        >>> SABA(step_size=0.1).key is None
        True
    """

    step_size: float
    key: str | None = None
    readers: dict[str, "_Averages"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.step_size > 0:
            raise ConfigError(
                f"hypergradient.step_size: found {self.step_size}; expected a positive number. "
                "Correct hypergradient.step_size."
            )

    def solution(self, lower_loss: LowerLoss, inputs: Vector) -> tuple[Tensor, ...]:
        """Return theta*_l with the averaged pullback as its backward."""
        outputs: tuple[Tensor, ...] = Solution.apply(_AveragedPullback(self, lower_loss), *inputs)
        return outputs

    def check(self, problem: str, *, is_nested: bool, is_differentiated: bool) -> None:
        """Refuse a problem that another one both shapes and reads: the tables have no derivative."""
        if is_differentiated:
            raise ConfigError(
                f"problems.{problem}.hypergradient: found SABA, but a problem above '{problem}' both shapes "
                "and reads it, so its pullback is differentiated; expected an implicit hypergradient. Write "
                f"+hypergradient@problems.{problem}.hypergradient=cg, or set curvature: partial on the problem above."
            )

    def check_batches(self, problem: str, stream: Any, num_draws: int) -> None:
        """Refuse a stream that shuffles, or of which the pullbacks would never meet some batches."""
        if stream is None or self.key is not None:
            return
        if getattr(stream, "last_number", None) is None:
            raise ConfigError(_NO_PARTITION.format(problem=problem))
        num_seen = getattr(stream, "num_seen_every", None)
        if num_seen is not None and num_seen(num_draws) < stream.num_batches:
            raise ConfigError(
                f"problems.{problem}.stream: found {stream.num_batches} batches an epoch, of which every {num_draws}th "
                f"(unroll_steps x accumulate_batches) is met by a pullback: {num_seen(num_draws)} of them; expected "
                "that all are. Choose a batch_size or unroll_steps so that the two numbers have no divisor in common."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return q and the tables, by reader."""
        return {name: each.state_dict() for name, each in self.readers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state back."""
        self.readers = {name: _Averages.from_state_dict(each) for name, each in state.items()}


class _Table:
    """The last vector of each batch, and their sum."""

    def __init__(self) -> None:
        self._last: dict[Hashable, list[Tensor]] = {}
        self._sum: list[Tensor] = []

    def replace(self, key: Hashable, vector: Sequence[Tensor]) -> list[Tensor]:
        """Put a batch's new vector in the place of its old one; return SAGA's estimate of the mean."""
        old, count = self._last.get(key), len(self._last)
        self._last[key] = new = [tensor.detach().clone() for tensor in vector]
        if old is None:
            self._sum = add(self._sum, new) if count else [tensor.clone() for tensor in new]
            return new
        old = [tensor.to(like) for tensor, like in zip(old, new, strict=True)]
        total = [tensor.to(like) for tensor, like in zip(self._sum, new, strict=True)]
        change = add(new, old, -1.0)
        self._sum = add(total, change)
        return add(change, total, 1 / count)

    def state_dict(self) -> dict[str, Any]:
        """Return the vectors and their sum, which is not quite what they add up to again."""
        return {"last": [[key, list(vector)] for key, vector in self._last.items()], "sum": list(self._sum)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "_Table":
        """Return the table that was saved."""
        table = cls()
        table._last = {key: [tensor.clone() for tensor in vector] for key, vector in state["last"]}
        table._sum = [tensor.clone() for tensor in state["sum"]]
        return table


class _Averages:
    """What is kept for one reader."""

    def __init__(self) -> None:
        self.solution: list[Tensor] | None = None
        self.hessian = _Table()
        self.cross = _Table()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in plain containers."""
        return {
            "solution": None if self.solution is None else list(self.solution),
            "hessian": self.hessian.state_dict(),
            "cross": self.cross.state_dict(),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "_Averages":
        """Return the state that was saved."""
        averages = cls()
        if state["solution"] is not None:
            averages.solution = [tensor.clone() for tensor in state["solution"]]
        averages.hessian = _Table.from_state_dict(state["hessian"])
        averages.cross = _Table.from_state_dict(state["cross"])
        return averages


class _AveragedPullback:
    """The pullback of one solution node."""

    def __init__(self, settings: SABA, lower_loss: LowerLoss) -> None:
        self.settings = settings
        self.lower_loss = lower_loss
        self.outputs = lower_loss.theta

    def first_order(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the averaged `-M^T q` for the wanted inputs, and move q."""
        loss, number = self.lower_loss, self._number()
        averages = self.settings.readers.setdefault(loss.reader, _Averages())
        product = ReverseProduct(loss, theta, inputs, wanted)
        kept = averages.solution
        start = [torch.zeros_like(v) for v in cotangent] if kept is None else kept
        start = [q.to(v) for q, v in zip(start, cotangent, strict=True)]
        curved = averages.hessian.replace(number, loss.reduce(product.hessian(start)))
        residual = add(curved, loss.reduce(cotangent), -1.0)
        solution = add(start, residual, -self.settings.step_size)
        averages.solution = solution
        # Reduced, so that the tables are the same on all ranks.
        return scaled(averages.cross.replace(number, loss.reduce(product.cross(solution))), -1.0)

    def differentiable(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Not called: `check` refuses the graphs that would."""
        raise AssertionError("The pullback from tables has no derivative.")

    def _number(self) -> Hashable:
        loss, key = self.lower_loss, self.settings.key
        if key is None:
            if loss.batch_number is None:
                raise ConfigError(_NO_PARTITION.format(problem=loss.problem))
            return loss.batch_number
        value = loss.batch.get(key) if isinstance(loss.batch, Mapping) else None
        found: set[Any] = set(value.reshape(-1).tolist()) if isinstance(value, Tensor) else {value}
        if len(found) != 1 or not isinstance(next(iter(found)), int):
            raise ConfigError(
                f"hypergradient.key: found '{key}', which in the batch of '{loss.problem}' is {value!r:.200}; expected "
                "an entry that holds one whole number, the same in each epoch. Correct hypergradient.key."
            )
        number: int = found.pop()
        return number


_NO_PARTITION = (
    "problems.{problem}.hypergradient: found SABA, which keeps a vector for each batch, but the batches of "
    "'{problem}' are others in each epoch (or were handed to Program.gradient); expected a fixed partition. Write "
    "problems.{problem}.stream.shuffle: false, or name an entry of the batch that numbers it as hypergradient.key."
)
