"""Residual layers on several ranks, each of which has a part of the batch as well, as in data-parallel training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlotool.core.errors import ConfigError
from mlotool.layerparallel.multigrid.call import CallArguments
from mlotool.layerparallel.multigrid.exchange import AbstractExchange, Alone
from mlotool.layerparallel.multigrid.functions import Gradient
from mlotool.layerparallel.multigrid.propagation import solve_adjoints, solve_states
from mlotool.layerparallel.multigrid.settings import Method
from mlotool.layerparallel.multigrid.steps import Evaluate

# b: samples of this rank, B: of all ranks, L: layers of this rank


class _System(Protocol):
    """The layers, and how they are solved."""

    num_layers: int
    h: float
    methods: tuple[Method, Method]
    is_serial: bool

    def evaluate(self, theta: Sequence[Tensor]) -> Evaluate:
        """Return the layers with these parameters."""

    def recall(self, kind: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return a warm start of the "states" or "adjoints"."""

    def keep(self, kind: str, values: Tensor, residuals: Tensor) -> None:
        """Take what was found."""

    def inspect(
        self,
        gradient: Gradient,
        last: Tensor,
        again: "Callable[[_System], tuple[Gradient, Tensor]]",
        norm: Callable[[Tensor], Tensor],
    ) -> Gradient:
        """See the gradient before it is handed on; return it, or a better one."""


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
        shared = _Shared(forward, backward, _sizes(forward, u0), theta)
        whole = _joined(forward, u0, shared.sizes)
        states, last = shared.states(system, whole)
        ctx.system, ctx.shared = system, shared
        ctx.save_for_backward(whole, states, last)
        return _own(forward, last, shared.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Return the gradients of this rank's samples and layers, by one adjoint solve that all ranks share."""
        whole, states, last = ctx.saved_tensors
        shared: _Shared = ctx.shared
        whole_cotangent = _joined(shared.forward, cotangent, shared.sizes)

        def again(other: _System) -> tuple[Gradient, Tensor]:
            found, found_last = shared.states(other, whole)
            return shared.gradient(other, whole, found, whole_cotangent), found_last

        gradient = shared.gradient(ctx.system, whole, states, whole_cotangent)
        return None, None, None, *ctx.system.inspect(gradient, last, again, shared.forward.norm)


@dataclass(frozen=True)
class _Shared:
    """One batch, whose layers are divided among the ranks: the solves for the samples of all."""

    forward: AbstractExchange
    backward: AbstractExchange
    sizes: list[int]
    theta: Sequence[Tensor]

    def own_layers(self, system: _System) -> range:
        """Return the numbers of this rank's layers."""
        count = system.num_layers // self.forward.num_parts
        return range(self.forward.part * count, (self.forward.part + 1) * count)

    def states(self, system: _System, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states of this rank's points, and the last one of all."""
        if system.is_serial:
            own, states = self.own_layers(system), self._serial_states(system, whole)
            return states[own.start : own.stop + 1], states[-1]
        initial = system.recall("states", (system.num_layers // self.forward.num_parts + 1, *whole.shape))
        states, residuals = solve_states(
            self._evaluate(system), whole, system.num_layers, system.h, system.methods[0], initial, self.forward
        )
        system.keep("states", states, residuals)
        return states, self.backward.origin(states[-1])

    def gradient(self, system: _System, whole: Tensor, states: Tensor, cotangent: Tensor) -> Gradient:
        """Return that of this rank's samples of u0, and of theta in this rank's layers."""
        own = self.own_layers(system)
        adjoints, first = self._adjoints(system, whole, states, cotangent)
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in self.theta]
            moved = system.evaluate(leaves)(states[:-1], own, system.h)
        # Zeros, not None, where a parameter is another rank's: all ranks then have the same list of gradients.
        slopes: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
        if moved.requires_grad:
            slopes = torch.autograd.grad(moved, leaves, adjoints[1:], materialize_grads=True)
        return [_own(self.forward, first, self.sizes), *slopes]

    def _adjoints(self, system: _System, whole: Tensor, states: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of this rank's points, and the first one of all."""

        def solve(states: Tensor, initial: Tensor | None, exchange: AbstractExchange) -> tuple[Tensor, Tensor]:
            evaluate, method = self._evaluate(system), system.methods[1]
            return solve_adjoints(evaluate, states, cotangent, system.num_layers, system.h, method, initial, exchange)

        if system.is_serial:
            # Each rank computes all of it: this is a comparison, once in many steps.
            own, states = self.own_layers(system), self._serial_states(system, whole)
            adjoints, _ = solve(states, None, Alone())
            return adjoints[own.start : own.stop + 1], adjoints[0]
        adjoints, residuals = solve(states, system.recall("adjoints", tuple(states.shape)), self.backward)
        system.keep("adjoints", adjoints, residuals)
        return adjoints, self.forward.origin(adjoints[0])

    def _serial_states(self, system: _System, whole: Tensor) -> Tensor:
        evaluate, method = self._evaluate(system), system.methods[0]
        return solve_states(evaluate, whole, system.num_layers, system.h, method, None, Alone())[0]

    def _evaluate(self, system: _System) -> Evaluate:
        return system.evaluate([tensor.detach() for tensor in self.theta])


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


def check_equal_on_ranks(exchange: AbstractExchange, arguments: CallArguments) -> None:
    """Refuse arguments of the layers that belong to a rank's own samples: its layers are evaluated for those of all.

    Args:
        exchange: between the ranks.
        arguments: what the layers are given beside the state.

    Raises:
        ConfigError: a tensor has a gradient, or is another one on another rank.

    Example:
        >>> from mlotool.layerparallel.multigrid.exchange import Alone
        >>> check_equal_on_ranks(Alone(), CallArguments((torch.ones(2, 2),)))
    """
    found = "a tensor with a gradient" if arguments.tensors else None
    for tensor in () if found else arguments.constants():
        first, *others = exchange.gather(tensor[None])
        if not all(torch.equal(first, each) for each in others):
            found = f"a tensor of shape {tuple(tensor.shape)} that differs from rank to rank"
    if found:
        raise ConfigError(
            f"over_ranks: found {found} among the arguments of the layers; expected the state and what is equal on all "
            "ranks, such as a causal mask, since each rank evaluates its layers for the samples of all. Set "
            "over_ranks=false."
        )
