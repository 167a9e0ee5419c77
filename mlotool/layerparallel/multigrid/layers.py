"""Steps of a recursion, and runs of residual layers that multigrid can coarsen."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from mlotool.core.arguments import is_number, require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import kind_of
from mlotool.core.private import tree_flatten, tree_leaves, tree_unflatten
from mlotool.core.random_stream import outside_torch

# `step(u, n, h)`: the state (b, ...) after layer n of the finest grid, with step h.
Step = Callable[[Tensor, int, float], Tensor]

# `evaluate(values, layers, h)`: the states (k, b, ...) after k layers of the finest grid, each of its own state.
Evaluate = Callable[[Tensor, range, float], Tensor]


class BatchedStep:
    """A step that takes many layers in one call: a sweep visits the k-th layer of all chunks at once.

    `mgrit` and `mgrit_adjoint` take it in the place of a plain step. Called as one, it is that step.

    Args:
        evaluate: `(values (k, b, ...), layers, h) -> (k, b, ...)`; `layers` is a range of k layer indices, and a
            stacked weight's part is `weight[layers.start : layers.stop : layers.step]`, without a copy.

    Example:
        >>> rates = torch.arange(4.0)
        >>> step = BatchedStep(lambda u, layers, h: u + h * rates[layers.start:layers.stop:layers.step, None, None] * u)
        >>> step.many(torch.ones(2, 1, 1), range(1, 4, 2), 0.5).flatten(), step(torch.ones(1, 1), 3, 0.5)
        (tensor([1.5000, 2.5000]), tensor([[2.5000]]))
    """

    def __init__(self, evaluate: Evaluate) -> None:
        self.many = evaluate

    def __call__(self, values: Tensor, layer: int, step_size: float) -> Tensor:
        """Return the state after one layer."""
        return self.many(values[None], range(layer, layer + 1), step_size)[0]


def batched(step: Any) -> Evaluate:
    """Return what evaluates many layers of a step: the step's own `many`, or the step for one layer after the other.

    Args:
        step: a function `step(u, n, h)`, or an object with a method `many`, such as `BatchedStep` or `Layers`.

    Raises:
        ConfigError: from what is returned, where a layer returns no tensor or one of another shape, or changes the
            state that it was given.

    Example:
        >>> evaluate = batched(lambda u, n, h: u + h * n)
        >>> evaluate(torch.zeros(2, 1, 1), range(4, 8, 2), 0.5).flatten()
        tensor([2., 3.])
    """
    many: Evaluate | None = getattr(step, "many", None)

    def evaluate(values: Tensor, layers: range, step_size: float) -> Tensor:
        version = None if values.is_inference() else values._version
        if many is not None:
            name = f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start}, {layers[1]}, ..."
            return check_state(f"step: {name}", values, many(values, layers, step_size), version)
        moved = [
            check_state(f"step: layer {layer}", value, step(value, layer, step_size), version)
            for value, layer in zip(values, layers, strict=True)
        ]
        return torch.stack(moved)

    return evaluate


def check_state(name: str, state: Tensor, moved: Any, version: int | None = None) -> Tensor:
    """Return what a layer has made of a state, and refuse what is no state after it.

    Args:
        name: of the layer, for messages.
        state: that it was given.
        moved: what it returned.
        version: of the state before; None: it may have been changed.

    Raises:
        ConfigError: it returned no tensor or one of another shape, or has changed the state that it was given.

    Example:
        >>> check_state("block 0", torch.ones(2), torch.zeros(2))
        tensor([0., 0.])
    """
    if not isinstance(moved, Tensor):
        fault, advice = f"returned {kind_of(moved)}", "Return only the state after the layer"
    elif version is not None and state._version != version:
        fault, advice = "changed the state that it was given", "Write u = u + x in place of u.add_(x) or u += x"
    elif moved.shape != state.shape:
        fault = f"turned a state of shape {tuple(state.shape)} into {tuple(moved.shape)}"
        advice = "Name other layers, or keep it outside of the multigrid part"
    else:
        return moved
    raise ConfigError(f"{name} {fault}; expected a new tensor of the state's shape. {advice}.")


class Linearised:
    """Products with the Jacobians of layers at fixed states; each layer is traced once for a step size.

    A level's groups of layers are the same in every cycle, so their graphs are kept from one to the next: at most
    those of 1 + 1/(c - 1) backward passes, as backpropagation keeps those of one.

    Args:
        evaluate: the layers, many of them in one call.
        states: `states(layers)`, the states (k, b, ...) at which k layers are linearized.

    Example:
        >>> states = torch.ones(3, 1, 1)
        >>> jacobians = Linearised(batched(lambda u, n, h: u + h * u**2), lambda layers: states[:-1])
        >>> jacobians.transposed(torch.ones(2, 1, 1), range(2), 0.5).flatten()
        tensor([2., 2.])
    """

    def __init__(self, evaluate: Evaluate, states: Callable[[range], Tensor]) -> None:
        self._evaluate = evaluate
        self._states = states
        self._traces: dict[tuple[range, float], tuple[Tensor, Tensor]] = {}
        self._pulled: dict[tuple[range, float], tuple[Tensor, Tensor]] = {}

    def transposed(self, cotangents: Tensor, layers: range, step_size: float) -> Tensor:
        """Return `(dPhi_n/du)^T w_n` of k layers n.

        Args:
            cotangents: w, (k, b, ...).
            layers: the numbers of the k layers.
            step_size: of each of these layers.
        """
        at, moved = self._trace(layers, step_size)
        return torch.autograd.grad(moved, at, cotangents, retain_graph=True, materialize_grads=True)[0]

    def plain(self, tangents: Tensor, layers: range, step_size: float) -> Tensor:
        """Return `(dPhi_n/du) v_n` of k layers n: the product is linear in its cotangent, and this is its transpose.

        Args:
            tangents: v, (k, b, ...).
            layers: the numbers of the k layers.
            step_size: of each of these layers.
        """
        key = (layers, step_size)
        if key not in self._pulled:
            at, moved = self._trace(layers, step_size)
            with torch.enable_grad():
                cotangent = torch.zeros_like(moved, requires_grad=True)
                pulled = torch.autograd.grad(moved, at, cotangent, create_graph=True, materialize_grads=True)[0]
            self._pulled[key] = cotangent, pulled
        cotangent, pulled = self._pulled[key]
        return torch.autograd.grad(pulled, cotangent, tangents, retain_graph=True, materialize_grads=True)[0]

    def _trace(self, layers: range, step_size: float) -> tuple[Tensor, Tensor]:
        key = (layers, step_size)
        if key not in self._traces:
            with torch.enable_grad():
                at = self._states(layers).detach().requires_grad_()
                self._traces[key] = at, self._evaluate(at, layers, step_size)
        return self._traces[key]


# k: some of the layers, b: batch

_OF_PART = "of the multigrid part"


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


class _AbstractBlocks(nn.Module, ABC):
    """N blocks that are layers, one after the other; all are given the same further arguments beside the state."""

    def __init__(self, blocks: Iterable[nn.Module], h: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        require(bool(self.blocks), "blocks", [], "one block a layer", "Pass the modules of the layers.")
        _check_step(h)
        self.num_layers = len(self.blocks)
        self.h = h

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
        return torch.stack([self._step(state, self._called(n, state, args, kwargs), h) for state, n in pairs])

    def _run(self, state: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        for n in range(self.num_layers):
            state = self._step(state, self._called(n, state, args, kwargs), self.h)
        return state

    def _called(self, n: int, state: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        block = self.blocks[n]
        return check_state(f"block {n} ({type(block).__name__}) {_OF_PART}", state, block(state, *args, **kwargs))

    @abstractmethod
    def _step(self, state: Tensor, returned: Tensor, h: float) -> Tensor:
        """Return the state after a layer, from what its block has returned."""


class BlockLayers(_AbstractBlocks):
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

    def forward(self, state: Tensor) -> Tensor:
        """Return u^N (b, ...) of u^0 (b, ...), one layer after the other."""
        return self._run(state, (), {})

    def _step(self, state: Tensor, returned: Tensor, h: float) -> Tensor:
        return state + h * returned


class WholeLayers(_AbstractBlocks):
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

    def forward(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return u^N (b, ...) of u^0 (b, ...), one layer after the other; all blocks get the further arguments."""
        return self._run(state, args, kwargs)

    def _step(self, state: Tensor, returned: Tensor, h: float) -> Tensor:
        return returned if h == 1.0 else state + h * (returned - state)


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
        require(not buffers, "make_block", buffers, "blocks without buffers", "Use BlockLayers.")
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
            # Without vmap, as in a pass through the layers.
            row = [tensor[layers.start] for tensor in self.stacked]
            return self._step(row, states[0], h)[None]
        parameters = tuple(tensor[layers.start : layers.stop : layers.step] for tensor in self.stacked)
        run = torch.vmap(lambda row, state: self._step(row, state, h), randomness="different")
        moved: Tensor = run(parameters, states)
        return moved

    @property
    def block(self) -> nn.Module:
        """One block, without parameters of its own, which runs with those of each layer."""
        return self._template[0].train(self.training)

    def _step(self, parameters: Iterable[Tensor], state: Tensor, h: float) -> Tensor:
        own, block = dict(zip(self._names, parameters, strict=True)), self.block
        change: Tensor = torch.func.functional_call(block, own, (state,))
        return state + h * check_state(f"a {type(block).__name__} block {_OF_PART}", state, change)


def _check_step(h: float) -> None:
    require(is_number(h) and isfinite(h), "h", h, "a finite number", "Give the step of each layer.")


def check_pure(
    layers: nn.Module, evaluate: Callable[[Sequence[Tensor]], Evaluate], theta: Sequence[Tensor], states: Tensor
) -> None:
    """Refuse layers whose gradient multigrid would miss a part of, by evaluating each once.

    Args:
        layers: a module of `Layers`.
        evaluate: what evaluates them for a batch, with such parameters.
        theta: their parameters, and the arguments with a gradient.
        states: (N + 1, b, ...), at which each is evaluated.

    Raises:
        ConfigError: a layer reads a tensor with a gradient that is none of theta, leaves one in an attribute, or draws
            random numbers of Python's or numpy's.

    Example:
        >>> layers = BlockLayers([nn.Tanh() for _ in range(4)])
        >>> check_pure(layers, lambda theta: layers.many, [], torch.ones(5, 2, 3))
    """
    leaves = [tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex()) for tensor in theta]
    own, drawn, kept = {id(leaf) for leaf in leaves}, outside_torch(), {id(tensor) for _, tensor in _kept(layers)}
    many, h = evaluate(leaves), layers.h
    for n in range(len(states) - 1):
        with torch.enable_grad():
            moved = many(states[n : n + 1].detach(), range(n, n + 1), h)  # type: ignore[arg-type]
        foreign = next((leaf for leaf in _sources(moved) if id(leaf) not in own), None)
        left = next((name for name, tensor in _kept(layers) if id(tensor) not in kept), None)
        if foreign is not None:
            fault = f"reads {kind_of(foreign)} that requires a gradient, and is neither its parameter nor an argument"
            advice = "Give it to all blocks as an argument, or make it a parameter or submodule of the blocks"
        elif left is not None:
            fault = f"leaves a tensor with a gradient in its attribute '{left}'"
            advice = "Detach it there, or compute what the loss reads from the states between the blocks"
        elif outside_torch() != drawn:
            fault, advice = "draws random numbers of Python's or numpy's", "Draw them by torch"
        else:
            continue
        raise ConfigError(f"parallel.part: layer {n} {fault}, which multigrid would miss. {advice}.")


def _sources(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the leaves with a gradient from which a tensor was computed."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            waiting += [source for source, _ in node.next_functions]


def _kept(layers: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the computed tensors with a gradient in attributes of modules, also in lists, tuples and dicts."""
    for module in layers.modules():
        for name, value in vars(module).items():
            # Parameters and buffers are no computed tensors, and modules are looked at by themselves.
            leaves = tree_leaves(value) if type(value) in (list, tuple, dict) else [value]
            yield from ((name, leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None)


class CallArguments:
    """The arguments of a block beside its state, the same for all blocks; those with a gradient can be replaced.

    Args:
        args: by position, behind the state.
        kwargs: by name.

    Attributes:
        tensors: those that require a gradient, each once a place.
        constants: the tensors that require none.

    Example:
        >>> condition = torch.ones(2, requires_grad=True)
        >>> arguments = CallArguments((condition,), {"is_causal": True})
        >>> len(arguments.tensors), arguments.filled([torch.zeros(2)])
        (1, ((tensor([0., 0.]),), {'is_causal': True}))
    """

    def __init__(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        self._leaves, self._structure = tree_flatten((tuple(args), dict(kwargs or {})))
        tensors = [(place, leaf) for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self._places = [place for place, tensor in tensors if tensor.requires_grad]
        self.tensors: list[Tensor] = [self._leaves[place] for place in self._places]
        self.constants: list[Tensor] = [tensor for _, tensor in tensors if not tensor.requires_grad]

    def __bool__(self) -> bool:
        """Return whether there is any."""
        return bool(self._leaves)

    def filled(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments by position and by name, with other tensors in the places of `tensors`."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs

    def equals(self, other: "CallArguments") -> bool:
        """Say whether two calls were given the same: tensors with a gradient are compared by identity."""
        return self._structure == other._structure and all(map(_is_same, self._leaves, other._leaves))


def _is_same(one: Any, other: Any) -> bool:
    if one is other or not (isinstance(one, Tensor) or isinstance(other, Tensor)):
        return one is other or bool(np.array_equal(one, other))
    # A part of a mask may be cut out anew for each block.
    are_plain = all(isinstance(value, Tensor) and not value.requires_grad for value in (one, other))
    return are_plain and one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
