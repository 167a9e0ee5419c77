"""Runs of residual layers that multigrid can coarsen."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mlotool.core.arguments import is_number, require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import kind_of

# k: some of the layers, b: batch


@runtime_checkable
class Layers(Protocol):
    """What multigrid needs of a module that is N residual layers; `mlotool.models.ResidualLayers` is one.

    Attributes:
        num_layers: N.
        h: step of each layer.

    Example:
        >>> isinstance(BlockLayers([nn.Tanh(), nn.Tanh()]), Layers), isinstance(nn.Sequential(nn.Tanh()), Layers)
        (True, False)
    """

    num_layers: int
    h: float

    def many(self, states: Tensor, layers: range, h: float) -> Tensor:
        """Return the states (k, b, ...) after k layers, each applied to a state of its own.

        Args:
            states: (k, b, ...), one for each layer.
            layers: the numbers of the k layers.
            h: the step, in place of the layers' own.
        """

    def __call__(self, state: Tensor) -> Tensor:
        """Return the last state of the first one, one layer after the other.

        Where the forward also has the argument `layers: range | None = None`, the numbers of those that run, auxiliary
        variables may cut between any two layers.
        """


class BlockLayers(nn.Module):
    """N residual layers `u^{n+1} = u^n + h F^n(u^n)` of any blocks F that keep the shape; one after the other.

    Args:
        blocks: F^0 to F^{N-1}.
        h: the step.

    Raises:
        ConfigError: there is no block.

    Example:
        >>> layers = BlockLayers([nn.Tanh() for _ in range(4)], h=0.5)
        >>> layers(torch.zeros(2, 3)).shape, layers.many(torch.zeros(2, 2, 3), range(0, 4, 2), 1.0).shape
        (torch.Size([2, 3]), torch.Size([2, 2, 3]))
    """

    def __init__(self, blocks: Iterable[nn.Module], h: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        if not self.blocks:
            raise ConfigError("blocks: found none; expected one block a layer. Pass the modules F^0, F^1, ...")
        _check_step(h)
        self.num_layers = len(self.blocks)
        self.h = h

    def forward(self, state: Tensor) -> Tensor:
        """Return u^N (b, ...) of u^0 (b, ...), one layer after the other."""
        for n in range(self.num_layers):
            state = self._step(state, n, self.h)
        return state

    def many(self, states: Tensor, layers: range, h: float) -> Tensor:
        """Return the states (k, b, ...) after k layers, each applied to a state of its own; see `Layers`."""
        return torch.stack([self._step(state, n, h) for state, n in zip(states.unbind(), layers, strict=True)])

    def _step(self, state: Tensor, n: int, h: float) -> Tensor:
        change = self.blocks[n](state)
        _check_shape(f"block {n} ({type(self.blocks[n]).__name__})", state, change)
        return state + h * change


class WholeLayers(nn.Module):
    """N layers `u^{n+1} = B^n(u^n)` whose blocks include the shortcut: `F^n(u) = B^n(u) - u` with the step 1.

    Args:
        blocks: B^0 to B^{N-1}, such as the equal blocks of one stage of a residual network, or those of a transformer.

    Raises:
        ConfigError: there is no block.

    Example:
        >>> double = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(double.weight, 2.0)
        >>> WholeLayers([double, double]).many(torch.ones(1, 1, 1), range(1), 4.0).item()
        5.0
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        if not self.blocks:
            raise ConfigError("blocks: found none; expected one block a layer. Pass the modules B^0, B^1, ...")
        self.num_layers = len(self.blocks)
        self.h = 1.0

    def forward(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return u^N (b, ...) of u^0 (b, ...), one layer after the other; all blocks get the further arguments."""
        for n in range(self.num_layers):
            state = self._step(state, n, self.h, args, kwargs)
        return state

    def many(self, states: Tensor, layers: range, h: float, /, *args: Any, **kwargs: Any) -> Tensor:
        """Return the states (k, b, ...) after k layers, each applied to a state of its own; see `Layers`.

        Args:
            states: (k, b, ...), one for each layer.
            layers: the numbers of the k layers.
            h: the step.
            args: further arguments of each block, behind the state.
            kwargs: the same by name.
        """
        pairs = zip(states.unbind(), layers, strict=True)
        return torch.stack([self._step(state, n, h, args, kwargs) for state, n in pairs])

    def _step(self, state: Tensor, n: int, h: float, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        moved = self.blocks[n](state, *args, **kwargs)
        _check_shape(f"block {n} ({type(self.blocks[n]).__name__})", state, moved)
        return moved if h == 1.0 else state + h * (moved - state)


class StackedLayers(nn.Module):
    """N residual layers of one kind of block, whose parameters are stacked: `torch.vmap` runs many of them at once.

    Args:
        make_block: called N times; the blocks have the same structure and no buffers. Those that draw random numbers
            run one by one.
        num_layers: N.
        h: the step.

    Raises:
        ConfigError: a block has buffers.

    Example:
        >>> layers = StackedLayers(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()), num_layers=4, h=0.5)
        >>> [tuple(p.shape) for p in layers.parameters()]
        [(4, 3, 3), (4, 3)]
    """

    def __init__(self, make_block: Callable[[], nn.Module], num_layers: int, h: float = 1.0) -> None:
        super().__init__()
        _check_step(h)
        blocks = [make_block() for _ in range(num_layers)]
        buffers = [name for name, _ in blocks[0].named_buffers()]
        if buffers:
            raise ConfigError(
                f"make_block: found the buffer '{buffers[0]}' in {type(blocks[0]).__name__}; expected none, since "
                "stacked layers run in one call. Use BlockLayers."
            )
        self._names = [name for name, _ in blocks[0].named_parameters()]
        stacked, _ = torch.func.stack_module_state(blocks)
        self.stacked = nn.ParameterList(nn.Parameter(stacked[name].detach()) for name in self._names)
        # A template without parameters of its own: those are the stacked ones.
        self._template = (blocks[0].to("meta"),)
        self.num_layers = num_layers
        self.h = h

    def forward(self, state: Tensor, layers: range | None = None) -> Tensor:
        """Return the state (b, ...) after these layers, one after the other; None are all."""
        rows = list(zip(*(tensor.unbind() for tensor in self.stacked), strict=True))
        for n in range(self.num_layers) if layers is None else layers:
            state = self._step(rows[n], state, self.h)
        return state

    def many(self, states: Tensor, layers: range, h: float) -> Tensor:
        """Return the states (k, b, ...) after k layers, each applied to its own state, in one call; see `Layers`."""
        if len(layers) == 1:
            # Without vmap, in which nothing may be drawn at random.
            row = [tensor[layers.start] for tensor in self.stacked]
            return self._step(row, states[0], h)[None]
        parameters = tuple(tensor[layers.start : layers.stop : layers.step] for tensor in self.stacked)
        moved: Tensor = torch.vmap(lambda own, state: self._step(own, state, h))(parameters, states)
        return moved

    @property
    def block(self) -> nn.Module:
        """One block, without parameters of its own, which runs with those of each layer."""
        return self._template[0].train(self.training)

    def _step(self, parameters: Iterable[Tensor], state: Tensor, h: float) -> Tensor:
        own, block = dict(zip(self._names, parameters, strict=True)), self.block
        change: Tensor = torch.func.functional_call(block, own, (state,))
        _check_shape(f"a {type(block).__name__} block", state, change)
        return state + h * change


def _check_step(h: float) -> None:
    require(is_number(h) and isfinite(h), "h", h, "a finite number", "Give the step of each layer.")


def _check_shape(name: str, state: Tensor, found: Any) -> None:
    """Refuse a block that returns something else than a state, or changes the shape."""
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"{name} of the multigrid part returned {kind_of(found)}; expected a tensor, the state after it. Let the "
            "blocks return that alone, or wrap them in a module that does."
        )
    if found.shape != state.shape:
        raise ConfigError(
            f"{name} of the multigrid part turned a state of shape {tuple(state.shape)} into {tuple(found.shape)}; "
            "expected blocks that keep the shape, since coarse grids leave layers out. Name others by part, or move it "
            "before or behind that part."
        )


def draws_numbers(layers: nn.Module) -> bool:
    """Say whether layers have a dropout, as modules of torch's show it.

    Args:
        layers: a module, of which all submodules are looked at.

    Example:
        >>> [draws_numbers(nn.Sequential(nn.Linear(2, 2), nn.Dropout(p))) for p in (0.0, 0.5)]
        [False, True]
    """
    inside = layers.block.modules() if isinstance(layers, StackedLayers) else ()
    return any(_draws(module) for module in (*layers.modules(), *inside))


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    # These two draw without a module of that kind.
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
