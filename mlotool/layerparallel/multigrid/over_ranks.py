"""Residual layers on several ranks, each of which has a part of the batch as well, as in data-parallel training."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlotool.layerparallel.multigrid.exchange import AbstractExchange
from mlotool.layerparallel.multigrid.propagation import solve_adjoints, solve_states
from mlotool.layerparallel.multigrid.settings import Method
from mlotool.layerparallel.multigrid.steps import Evaluate

# b: samples of this rank, B: of all ranks, L: layers of this rank


class _System(Protocol):
    """The layers, and how they are solved."""

    num_layers: int
    h: float

    def evaluate(self, theta: Sequence[Tensor]) -> Evaluate:
        """Return the layers with these parameters."""

    def methods(self) -> tuple[Method, Method]:
        """Return those of the forward and of the backward solve."""

    def recall(self, kind: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return a warm start of the "states" or "adjoints"."""

    def keep(self, kind: str, values: Tensor, residuals: Tensor) -> None:
        """Take what was found."""


class LastStates(torch.autograd.Function):
    """Autograd function of u^N of u0 and theta, where each rank has samples of its own and a part of the layers.

    The samples of all ranks are gathered, their layers solved together, and each rank gets its samples' last states. In
    the backward a rank's gradient of theta is that of its own layers, for all ranks' losses together, and zero for the
    other layers: the sum over ranks is that of data-parallel training, and so is its mean. It is differentiable once.

    Its arguments are the system of the solves (`BatchSystem`), the exchanges of states and of adjoints, u0 (b, ...) of
    this rank's b samples, and the parameters of all layers. It returns u^N (b, ...) of these samples.

    Raises:
        ConfigError: the layers cannot be divided among the ranks.

    Example:
        >>> from mlotool.layerparallel.multigrid import MultigridResidual
        >>> from mlotool.layerparallel.multigrid.exchange import Alone
        >>> from mlotool.layerparallel.multigrid.system import BatchSystem
        >>> part = MultigridResidual(lambda: torch.nn.Linear(3, 3), num_layers=16, h=0.1)
        >>> (names, theta), u0 = zip(*part.layers.named_parameters()), torch.ones(2, 3)
        >>> LastStates.apply(BatchSystem(part, names, u0, index=None), Alone(), Alone(), u0, *theta).shape
        torch.Size([2, 3])
    """

    @staticmethod
    def forward(
        ctx: Any, system: _System, forward: AbstractExchange, backward: AbstractExchange, u0: Tensor, *theta: Tensor
    ) -> Tensor:
        """Return the last states of this rank's samples, by one solve that all ranks share."""
        sizes = _sizes(forward, u0)
        whole = _joined(forward, u0, sizes)
        evaluate = system.evaluate([tensor.detach() for tensor in theta])
        initial = system.recall("states", (system.num_layers // forward.num_parts + 1, *whole.shape))
        states, residuals = solve_states(
            evaluate, whole, system.num_layers, system.h, system.methods()[0], initial, forward
        )
        system.keep("states", states, residuals)
        ctx.system, ctx.exchanges, ctx.sizes = system, (forward, backward), sizes
        ctx.save_for_backward(states, *theta)
        return _own(forward, backward.origin(states[-1]), sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Return the gradients of this rank's samples and layers, by one adjoint solve that all ranks share."""
        states, *theta = ctx.saved_tensors
        system, (forward, backward), sizes = ctx.system, ctx.exchanges, ctx.sizes
        whole = _joined(forward, cotangent, sizes)
        detached = [tensor.detach() for tensor in theta]
        initial = system.recall("adjoints", tuple(states.shape))
        adjoints, residuals = solve_adjoints(
            system.evaluate(detached),
            states,
            whole,
            system.num_layers,
            system.h,
            system.methods()[1],
            initial,
            backward,
        )
        system.keep("adjoints", adjoints, residuals)
        begin, count = forward.part * (len(states) - 1), len(states) - 1
        with torch.enable_grad():
            leaves = [tensor.requires_grad_() for tensor in detached]
            moved = system.evaluate(leaves)(states[:-1], range(begin, begin + count), system.h)
        # Zeros, not None, where a parameter is another rank's: all ranks then have the same list of gradients.
        slopes: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
        if moved.requires_grad:
            slopes = torch.autograd.grad(moved, leaves, adjoints[1:], materialize_grads=True)
        return None, None, None, _own(forward, forward.origin(adjoints[0]), sizes), *slopes


def _sizes(exchange: AbstractExchange, values: Tensor) -> list[int]:
    """Return how many samples each part has."""
    found: list[int] = exchange.gather(torch.tensor([len(values)], device=values.device)).tolist()
    return found


def _joined(exchange: AbstractExchange, own: Tensor, sizes: list[int]) -> Tensor:
    """Return the samples of all parts (B, ...), from each one's (b, ...): padded, since all exchange the same shape."""
    longest = max(sizes)
    padded = torch.cat([own, own.new_zeros(longest - len(own), *own.shape[1:])])
    parts = exchange.gather(padded.detach()).split(longest)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _own(exchange: AbstractExchange, whole: Tensor, sizes: list[int]) -> Tensor:
    """Return this part's samples."""
    return whole.split(sizes)[exchange.part].clone()


def joined_index(exchange: AbstractExchange, index: Tensor) -> Tensor:
    """Return the positions (B,) of the samples of all ranks, one rank's after the other.

    Args:
        exchange: between the ranks.
        index: (b,), the positions of this rank's samples in their data set.

    Example:
        >>> from mlotool.layerparallel.multigrid.exchange import Alone
        >>> joined_index(Alone(), torch.tensor([3, 1]))
        tensor([3, 1])
    """
    return _joined(exchange, index, _sizes(exchange, index))
