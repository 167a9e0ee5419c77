"""Parameters with a leading axis of tasks, and losses that are evaluated for each task by itself."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import MlotoolError
from mlotool.core.loss_output import LossOutput
from mlotool.core.private import tree_flatten, tree_map, tree_unflatten
from mlotool.core.replay import RandomState
from mlotool.distributed.collectives import Ranks
from mlotool.problem.streams.batches import bounds

Stacked = dict[int, tuple[Tensor, ...]]

_OfTask = Callable[[Stacked, Any], tuple[Tensor, Mapping[str, Tensor]]]


def stack_parameters(problem: str, module: nn.Module, num_tasks: int) -> None:
    """Replace each parameter that requires a gradient by `num_tasks` copies along a new first axis.

    Raises:
        ConfigError: the number is none, or the module keeps running statistics, which tasks cannot share.
    """
    running = [name for name, _ in module.named_buffers() if name.endswith(("running_mean", "running_var"))]
    expected = f"no running statistics with tasks={num_tasks}, since the tasks would share them"
    require(not running, f"problems.{problem}.module", ", ".join(running), expected, "Use another normalization.")
    replace_trained(module, lambda parameter: parameter.expand(num_tasks, *parameter.shape))


def replace_trained(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter that requires a gradient by a copy of what `make` returns for its values."""
    # With the originals, so that no copy takes the number of one.
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.requires_grad:
                if id(parameter) not in replaced:
                    replaced[id(parameter)] = parameter, nn.Parameter(make(parameter.detach()).clone())
                # A tied parameter has several places.
                child._parameters[name] = replaced[id(parameter)][1]


class TaskLosses:
    """Evaluates a loss for each task by itself: all at once by `torch.vmap`, or one after the other where it cannot.

    Args:
        problem: whose loss it is, for messages.
        num_tasks: how many there are, on all ranks together.
        devices: CUDA devices whose generators are used.
    """

    def __init__(self, problem: str, num_tasks: int, devices: tuple[torch.device, ...]) -> None:
        self._problem, self._num_tasks, self._devices = problem, num_tasks, devices
        self._is_mapped = True

    def __call__(
        self, evaluate: Callable[[Stacked, Any], LossOutput], stacked: Stacked, batch: Any, *, with_metrics: bool
    ) -> LossOutput:
        """Return the losses of all tasks, 1-D, with the mean of each metric.

        Args:
            evaluate: a task's loss, from its parameters and its part of the batch.
            stacked: by number of the problem, its stacked parameters.
            batch: tensors, in any nesting, whose first axis is the tasks'; or None.
            with_metrics: whether the metrics are wanted.

        Raises:
            ConfigError: the batch has another number of tasks.
        """

        def one(tensors: Stacked, part: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
            output = evaluate(tensors, part)
            return output.loss, dict(output.metrics) if with_metrics else {}

        num_own = len(next(iter(stacked.values()))[0])
        tree_map(lambda value: self._check(value, num_own), batch)
        losses, metrics = self._evaluated(one, stacked, batch)
        return LossOutput(losses, {name: values.mean() for name, values in metrics.items()})

    def _evaluated(self, one: _OfTask, stacked: Stacked, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        if not self._is_mapped:
            return self._one_by_one(one, stacked, batch)
        random = RandomState(self._devices)
        try:
            axes = 0, None if batch is None else 0
            return torch.vmap(one, in_dims=axes, randomness="different")(stacked, batch)
        except MlotoolError:
            raise
        except RuntimeError as error:
            refusal = error
        random.restore()
        # What is wrong without vmap too is told by the loss itself.
        output = self._one_by_one(one, stacked, batch)
        self._is_mapped = False
        text = f"torch.vmap cannot evaluate all tasks at once ({' '.join(str(refusal).split())[:200]}); they are taken"
        warnings.warn(f"problems.{self._problem}.tasks: {text} one after the other, which takes longer.", stacklevel=2)
        return output

    def _one_by_one(self, one: _OfTask, stacked: Stacked, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        leaves, structure = tree_flatten((stacked, batch))
        num_own = len(next(iter(stacked.values()))[0])
        # Not by index: its backward would fill zeros for all other tasks.
        parts = zip(*[leaf.unbind() if isinstance(leaf, Tensor) else [leaf] * num_own for leaf in leaves])  # noqa: B905
        losses, metrics = zip(*[one(*tree_unflatten(list(part), structure)) for part in parts], strict=True)
        return torch.stack(losses), {name: torch.stack([values[name] for values in metrics]) for name in metrics[0]}

    def _check(self, value: Any, num_own: int) -> Any:
        is_right = not isinstance(value, Tensor) or (value.dim() > 0 and len(value) == num_own)
        part = "" if num_own == self._num_tasks else f", this rank's part of {self._num_tasks}"
        expected = f"batches with {num_own} tasks along the first axis{part}"
        advice = f"Set stream.batch_size={self._num_tasks}, with data whose samples are tasks."
        require(is_right, f"problems.{self._problem}.loss", value, expected, advice)
        return value


def check_unmoved(problem: str, module: BoundModule) -> None:
    """Refuse a module that moves its buffers in losses of tasks: they would share them, and nothing keeps them.

    Args:
        problem: whose module it is.
        module: after an evaluation of the problem's own loss.

    Raises:
        ConfigError: it has moved one.
    """
    moved = module.moved_buffer()
    fault = f"the buffer {moved}, which its forward moves"
    expected = "buffers that stay in a loss that is evaluated for each task by itself, since the tasks would share them"
    advice = f"Write {{problem: {problem}, mode: eval}} as the role."
    require(moved is None, f"problems.{problem}.module", fault, expected, advice)


@dataclass(frozen=True)
class TaskShare:
    """A rank's tasks of a problem: its part of the first axis, as long as that of every other rank.

    Args:
        num_tasks: of all ranks together, a multiple of their number.
        ranks: those that have the others.

    Example:
        >>> share = TaskShare(4, Ranks(rank=1, size=2))
        >>> share.part(torch.tensor([[0], [1], [2], [3]]))
        tensor([[2],
                [3]])
    """

    num_tasks: int
    ranks: Ranks

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part (t, ...) of a tensor of all tasks (T, ...), the tasks that its batches have."""
        begin, end, _ = bounds(self.num_tasks, self.ranks.rank, self.ranks.size)
        return whole[begin:end]

    def whole(self, part: Tensor) -> Tensor:
        """Return the tensor of all tasks (T, ...), of which each rank has a part (t, ...); called by all."""
        return torch.cat(self.ranks.gather_tensors(part))
