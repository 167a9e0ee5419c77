"""A record of a problem's last optimizer steps (parameters, state, batches, random numbers), to differentiate them."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mlotool.core.bound_module import in_slots, lazy_copy
from mlotool.core.errors import ConfigError
from mlotool.core.gradient import dense
from mlotool.core.replay import RandomState
from mlotool.core.settings import Count, target
from mlotool.core.tracing import is_tracing
from mlotool.core.unchanged import ANY_KERNELS, fingerprint
from mlotool.problem.optimizers.rule import Gradient, Hyperparameters, State
from mlotool.problem.streams.stream import SameBatch, Stream

# Copies by name; None where there was none. On a CPU, those of what stays have the same memory.
Buffers = Mapping[str, Tensor | None]


def buffers_of(module: nn.Module) -> Buffers:
    """Return copies of the buffers of a module, which nobody may change.

    Example:
        >>> layer = nn.BatchNorm1d(1)
        >>> before = buffers_of(layer)
        >>> _ = layer(torch.tensor([[1.0], [3.0]]))
        >>> before["running_mean"], buffers_of(layer)["running_mean"]
        (tensor([0.]), tensor([0.2000]))
    """
    buffers: dict[str, Tensor | None] = {}
    for path, part in module.named_modules():
        # Of a module of torch.jit they are a dictionary that iterates otherwise.
        for key in part._buffers.keys():  # noqa: SIM118
            buffer = part._buffers[key]
            buffers[f"{path}.{key}" if path else key] = None if buffer is None else lazy_copy(buffer.detach())
    return buffers


@contextmanager
def _as_then(random: RandomState, module: nn.Module | None, buffers: Buffers) -> Iterator[None]:
    """Have the random numbers and the buffers of a step; the module may be any where it has no buffers."""
    paths = [name.rpartition(".") for name in buffers]
    slots = [(module.get_submodule(path)._buffers, key) for path, _, key in paths] if module is not None else []
    with random.replayed(), in_slots(slots, [*buffers.values()][: len(slots)]):
        yield


_CHANGED = (
    "problems.{problem}.loss: found another gradient (relative difference {error:.2g}) when a step was computed again; "
    "expected the same function each time. Use only torch's default generators, keep changing values in buffers of the "
    "module, and do not read changing buffers of other problems; or set hypergradient.remat=false."
)


class TakenGradient:
    """The gradient of a step, in two numbers per parameter.

    Args:
        gradient: over batches and ranks, before it is clipped; None of an unused parameter.
        trajectory: of the problem; comparisons raise its largest norm.

    Example:
        >>> taken = TakenGradient([torch.ones(2), None])
        >>> taken.compare([torch.ones(2), None], "w")  # nothing to refuse
    """

    def __init__(self, gradient: Gradient, trajectory: "Trajectory | None" = None) -> None:
        self._numbers: Tensor | None = _numbers(gradient)
        self._trajectory = Trajectory() if trajectory is None else trajectory

    @classmethod
    def of(cls, gradient: Gradient | None, trajectory: "Trajectory") -> "TakenGradient | None":
        """Return it where an unroll is looked at: the first one, the second, the fourth and so on; else None.

        Args:
            gradient: as above; None where it is not known.
            trajectory: of the problem.
        """
        is_looked_at = trajectory.num_unrolls & (trajectory.num_unrolls + 1) == 0 and not is_tracing()
        return cls(gradient, trajectory) if gradient is not None and is_looked_at else None

    @property
    def is_open(self) -> bool:
        """Whether there has been no comparison yet."""
        return self._numbers is not None

    def compare(self, gradient: Gradient, problem: str, precision: str = "fp32") -> None:
        """Refuse another gradient, at the first call.

        Later the problem above may have stepped, and a gradient that someone asks for is at its new parameters.

        Args:
            gradient: of the same step, computed again.
            problem: its name.
            precision: of its loss.

        Raises:
            ConfigError: it is another one, by more than rounding.
        """
        before, self._numbers = self._numbers, None
        if before is None or is_tracing():
            return
        now = _numbers(gradient)
        # A bias before a BatchNorm has a gradient of rounding alone: what counts is the size of the whole.
        size = max(math.hypot(*[norm for _, norm in numbers]) for numbers in (before.tolist(), now.tolist()))
        largest = self._trajectory.largest_norm = max(size, self._trajectory.largest_norm)
        errors = (before - now).abs().amax(1).tolist()
        for error, slope in zip(errors, gradient, strict=True):
            dtype = torch.bfloat16 if precision != "fp32" or slope is None else slope.dtype
            # What has overflowed is no sign of anything.
            if error > ANY_KERNELS.of(dtype) * largest:
                raise ConfigError(_CHANGED.format(problem=problem, error=error / size))


def _numbers(gradient: Gradient) -> Tensor:
    """Return the fingerprints as rows; zeros of what is unused."""
    device = next((slope.device for slope in gradient if slope is not None), None)
    nothing = torch.zeros(2, dtype=torch.float64, device=device)
    rows = [nothing if slope is None else fingerprint(slope) for slope in dense(gradient)]
    return torch.stack(rows)


Saved = Mapping[str, Any]
# By problem.
Streams = Mapping[str, Stream | SameBatch | None]


@dataclass(frozen=True)
class StepGraph:
    """The gradient of a step with its graph, where that is kept instead of being computed again.

    Args:
        theta: the parameters before the step, leaves.
        inputs: what shapes the problem, leaves in the order of `LowerView`.
        mean: the gradient, over batches and ranks; None where a parameter is unused.
    """

    theta: list[Tensor]
    inputs: list[Tensor]
    mean: list[Tensor | None]


@dataclass(frozen=True)
class LowerSnapshot:
    """A lower problem at the moment when a step of another one read it.

    Its random numbers are those of the step: a step that is taken again draws for its lower solutions as well.

    Args:
        theta: its parameters, one tensor each.
        stream: its stream as it stood, where a gradient goes on through its solution; else None.
        steps: those that led to theta, oldest first, where its hypergradient differentiates steps.
        has_all: whether the first of them is the first of its unroll.
    """

    theta: Sequence[Tensor]
    stream: Stream | SameBatch | None = None
    steps: "tuple[StepRecord, ...]" = ()
    has_all: bool = True

    def state_dict(self) -> dict[str, Any]:
        """Return all but the batches."""
        return {
            "theta": list(self.theta),
            "position": None if self.stream is None else self.stream.position(),
            "steps": [step.state_dict() for step in self.steps],
            "has_all": self.has_all,
        }

    @classmethod
    def from_state_dict(cls, name: str, state: Saved, streams: Streams, device: torch.device) -> "LowerSnapshot":
        """Return the snapshot of problem `name` that was saved, on a device."""
        stream = streams[name]
        there = None if stream is None or state["position"] is None else stream.at(state["position"])
        count = sum(len(step["random"]) for step in state["steps"])
        batches = iter([None] * count if there is None else there.recent(count))
        steps = tuple(StepRecord.from_state_dict(step, batches, streams, device) for step in state["steps"])
        return cls(on_device(state["theta"], device), there, steps, state["has_all"])


# By lower problem.
LowerSnapshots = Mapping[str, LowerSnapshot]


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Args:
        theta: the parameters before it, one tensor each; empty where the step is no checkpoint.
        state: the optimizer's state before it, one a parameter; likewise.
        hyperparameters: of the optimizer at this step, one mapping per parameter.
        draws: the batches of its gradient, each with the random state before its evaluation.
        lower_snapshots: the lower problems that it read, as they were.
        graph: of its gradient, where that is kept.
        gradient: over batches and ranks, before it is clipped, where that is kept; None of an unused parameter.
        buffers: of the problem's module before each evaluation; empty where it has none.
        taken: by which that gradient can be told from another one, where the step is looked at.
    """

    theta: tuple[Tensor, ...]
    state: tuple[State, ...]
    hyperparameters: tuple[Hyperparameters, ...]
    draws: tuple[tuple[Any, RandomState], ...]
    lower_snapshots: LowerSnapshots
    graph: StepGraph | None = None
    gradient: tuple[Tensor | None, ...] | None = None
    buffers: tuple[Buffers, ...] = ()
    taken: TakenGradient | None = None

    @property
    def is_checkpoint(self) -> bool:
        """Whether it has parameters and state."""
        return bool(self.theta)

    def evaluations(self, module: nn.Module | None) -> Iterator[tuple[Any, AbstractContextManager[None]]]:
        """Yield each batch with a context in which random numbers and buffers are those of the step.

        Args:
            module: of the problem.
        """
        buffers: Sequence[Buffers] = self.buffers or [{} for _ in self.draws]
        for (batch, random), buffer in zip(self.draws, buffers, strict=True):
            yield batch, _as_then(random, module, buffer)

    def on(self, device: torch.device, *, pinned: bool = False) -> "StepRecord":
        """Return it with its own tensors (no batches, no graph) on a device.

        Args:
            device: where to.
            pinned: into the host's pinned memory, from which a GPU reads without waiting.
        """

        def put(tensor: Tensor) -> Tensor:
            if not pinned or not tensor.is_cuda:
                return tensor.to(device, non_blocking=True)
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

        theta, states, gradient = (_moved(part, put) for part in (self.theta, self.state, self.gradient))
        return replace(self, theta=theta, state=states, gradient=gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return all but the batches and the graph."""
        return {
            "theta": list(self.theta),
            "state": [dict(entry) for entry in self.state],
            "settings": [dict(rates) for rates in self.hyperparameters],
            "random": [random.state_dict() for _, random in self.draws],
            "readings": {name: snapshot.state_dict() for name, snapshot in self.lower_snapshots.items()},
            "gradient": None if self.gradient is None else list(self.gradient),
            "buffers": [dict(buffer) for buffer in self.buffers],
        }

    @classmethod
    def from_state_dict(
        cls, state: Saved, batches: Iterator[Any], streams: Streams, device: torch.device
    ) -> "StepRecord":
        """Return the record that was saved, on a device; its batches are the next ones of `batches`."""
        draws = tuple((next(batches), RandomState.from_state_dict(random)) for random in state["random"])
        lower_snapshots = {
            name: LowerSnapshot.from_state_dict(name, entry, streams, device)
            for name, entry in state["readings"].items()
        }
        theta, states, gradient = (on_device(state[name], device) for name in ("theta", "state", "gradient"))
        buffers = tuple({name: on_device(x, device) for name, x in buffer.items()} for buffer in state["buffers"])
        settings = tuple(state["settings"])
        return cls(theta, states, settings, draws, lower_snapshots, gradient=gradient, buffers=buffers)


class Trajectory:
    """The steps of an unroll, oldest first.

    Args:
        is_kept: whether anything is recorded.
        horizon: how many of the last steps are kept; None keeps all since `clear`.

    Attributes:
        num_taken: steps of this unroll.
        num_unrolls: that were there before it, in this process.
        largest_norm: of its gradients that have been compared. Once a problem has converged its gradients are rounding
            alone, and none is like the other; they are small beside those that led there.
    """

    def __init__(self, is_kept: bool = False, horizon: int | None = None) -> None:
        self.is_kept, self.largest_norm, self._horizon = is_kept, 0.0, horizon
        self.num_taken = self.num_unrolls = 0
        self._steps: deque[StepRecord] = deque()

    @property
    def has_all(self) -> bool:
        """Whether the first step of the unroll is still there."""
        return self.num_taken == len(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._steps)

    def append(self, record: StepRecord) -> None:
        """Add the newest step; beyond the horizon, steps are dropped up to the last checkpoint that leads to it."""
        self._steps.append(record)
        self.num_taken += 1
        while self._horizon is not None and len(self._steps) > self._horizon:
            checkpoints = range(1, len(self._steps) - self._horizon + 1)
            if not any(self._steps[place].is_checkpoint for place in checkpoints):
                return
            self._steps.popleft()

    def clear(self) -> None:
        """Forget them: what shapes the problem has moved on."""
        self.num_unrolls += bool(self._steps)
        self._steps.clear()
        self.num_taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Return all but the batches, which a stream can fetch again."""
        return {
            "num_taken": self.num_taken,
            "steps": [record.state_dict() for record in self._steps],
            "largest_norm": self.largest_norm,
        }

    def load_state_dict(self, state: Saved, batches: Sequence[Any], streams: Streams, device: torch.device) -> None:
        """Take the state back.

        Args:
            state: what `state_dict` returned; a checkpoint's is on the CPU.
            batches: those of all the steps, oldest first.
            streams: of the lower problems that they read.
            device: of the problem's parameters.
        """
        self.clear()
        waiting = iter(batches)
        for step in state["steps"]:
            self.append(StepRecord.from_state_dict(step, waiting, streams, device))
        self.num_taken = state["num_taken"]
        self.largest_norm = state["largest_norm"]


def on_device(tree: Any, device: torch.device) -> Any:
    """Return parameters, gradients or optimizer states on a device; counts of steps stay where torch keeps them."""
    return _moved(tree, lambda tensor: tensor.to(device))


def _moved(tree: Any, put: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Mapping):
        return {key: value if key == "step" else _moved(value, put) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(_moved(value, put) for value in tree)
    return put(tree) if isinstance(tree, Tensor) else tree


def copied(state: State) -> State:
    """Return a copy that the next step in place does not change."""
    return {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True)
class AbstractStepStore(ABC):
    """Which steps of an unroll keep their parameters and optimizer state (a checkpoint), and on which device.

    The batches and random states of all steps are always kept.

    Args:
        offload: keep them in the host's memory, pinned, until they are needed; on a CPU they are there anyway.

    Attributes:
        saves_gradients: whether the gradients of the steps are kept, so that only the update has to be computed again.
        is_whole: whether every step is a checkpoint.

    Example:
        >>> @dataclass(frozen=True)
        ... class Odd(AbstractStepStore):
        ...     def keeps(self, number, num_steps):
        ...         return number == 0 or number % 2 == 1
        >>> [Odd().keeps(number, 4) for number in range(4)]
        [True, True, False, True]
    """

    offload: bool = field(default=False, kw_only=True)
    saves_gradients: ClassVar[bool] = True
    is_whole: ClassVar[bool] = False

    @abstractmethod
    def keeps(self, number: int, num_steps: int) -> bool:
        """Return whether a step is a checkpoint; the first one is.

        Args:
            number: of the step in its unroll, from 0.
            num_steps: of an unroll.
        """

    def num_free(self, num_steps: int, num_kept: int) -> int:
        """Return how many checkpoints more may be held while steps are taken again.

        Args:
            num_steps: that are to be taken again, one after the other.
            num_kept: checkpoints that are held.
        """
        return num_steps


@target("trajectory", home="mlotool.hypergradient")
@dataclass(frozen=True)
class KeepAll(AbstractStepStore):
    """Every step is a checkpoint: no step is computed again.

    Example:
        >>> KeepAll().keeps(3, 8)
        True
    """

    saves_gradients, is_whole = False, True

    def keeps(self, number: int, num_steps: int) -> bool:
        """Return true."""
        return True


@target("trajectory", home="mlotool.hypergradient")
@dataclass(frozen=True)
class KeepEvery(AbstractStepStore):
    """Every k-th step is a checkpoint. The gradients of all steps are kept, so that only updates are computed again.

    With Adam, an unroll of T steps holds T + 3 T / k vectors of the parameters' size (`KeepAll`: 3 T), and 3 k more
    while it is differentiated.

    Args:
        offload: keep them in the host's memory, pinned, until they are needed; on a CPU they are there anyway.
        steps: k.

    Raises:
        ConfigError: k is below 1.

    Example:
        >>> [KeepEvery(steps=3).keeps(number, 8) for number in range(5)]
        [True, False, False, True, False]
    """

    steps: Count = 4

    def keeps(self, number: int, num_steps: int) -> bool:
        """Return whether it is a k-th one."""
        return number % self.steps == 0


@target("trajectory", home="mlotool.hypergradient")
@dataclass(frozen=True)
class Binomial(AbstractStepStore):
    """A fixed number of checkpoints for any length of the unroll; the steps in between are computed again.

    With c checkpoints, unrolls of up to (c + r choose c) steps compute each step again at most r times, which is
    optimal.

    Args:
        offload: keep them in the host's memory, pinned, until they are needed; on a CPU they are there anyway.
        checkpoints: c.

    Raises:
        ConfigError: c is below 1.

    Source: Griewank 1992, Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
        differentiation (treeverse).

    Example:
        >>> [number for number in range(10) if Binomial(checkpoints=3).keeps(number, 10)]
        [0, 4, 7]
    """

    checkpoints: Count = 3
    # They would take as much as all parameters.
    saves_gradients = False

    def keeps(self, number: int, num_steps: int) -> bool:
        """Return whether the first sweep over an unroll leaves a checkpoint there."""
        place = 0
        for free in range(self.checkpoints - 1, -1, -1):
            if place >= number or free == 0 or num_steps - place < 2:
                break
            place += middle(num_steps - place, free)
        return place == number

    def num_free(self, num_steps: int, num_kept: int) -> int:
        """Return the number of checkpoints, of c, that are still free."""
        return max(0, self.checkpoints - num_kept)


def middle(num_steps: int, num_free: int) -> int:
    """Return after how many steps the next checkpoint belongs, so that the fewest steps are taken again.

    Args:
        num_steps: at least 2.
        num_free: checkpoints that may be held beside that at the beginning, at least 1.

    Example:
        >>> middle(10, 1), middle(10, 2), middle(10, 9)
        (6, 4, 1)
    """
    held, repeats = num_free + 1, 0
    while math.comb(held + repeats, held) < num_steps:
        repeats += 1
    # The second part has one checkpoint less, the first one repetition less; no part is shorter than it can well be.
    shortest = math.comb(held + repeats - 2, held) if repeats > 1 else 1
    return min(max(num_steps - math.comb(held - 1 + repeats, held - 1), shortest, 1), num_steps - 1)
