"""Refuses layers that read or leave more than their evaluation by multigrid can see."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mlotool.core.errors import ConfigError
from mlotool.core.messages import kind_of
from mlotool.layerparallel.multigrid.steps import Evaluate


class _System(Protocol):
    """The layers for one batch."""

    num_layers: int
    h: float

    def evaluate(self, theta: Sequence[Tensor]) -> Evaluate:
        """Return the layers with these parameters."""


def check_pure(layers: nn.Module, system: _System, theta: Sequence[Tensor], states: Tensor) -> None:
    """Refuse layers whose gradient multigrid would miss a part of, by evaluating each once.

    Args:
        layers: the module of all layers.
        system: evaluates them for a batch.
        theta: their parameters, and the arguments with a gradient.
        states: (N + 1, b, ...), at which each is evaluated.

    Raises:
        ConfigError: a layer reads a tensor with a gradient that is none of theta, leaves one in an attribute, or draws
            random numbers of Python's or numpy's.

    Example:
        >>> from mlotool.layerparallel.multigrid import MultigridResidual
        >>> from mlotool.layerparallel.multigrid.system import BatchSystem
        >>> part = MultigridResidual(lambda: nn.Linear(3, 3), num_layers=4, h=0.1)
        >>> (names, theta), states = zip(*part.layers.named_parameters()), torch.ones(5, 2, 3)
        >>> check_pure(part.layers, BatchSystem(part, names, states[0], index=None), theta, states)
    """
    leaves = [each.detach().requires_grad_(each.is_floating_point() or each.is_complex()) for each in theta]
    own, drawn, kept = {id(each) for each in leaves}, _drawn(), {id(each) for _, each in _kept(layers)}
    evaluate = system.evaluate(leaves)
    for n in range(system.num_layers):
        with torch.enable_grad():
            moved = evaluate(states[n : n + 1].detach(), range(n, n + 1), system.h)
        foreign = next((each for each in _sources(moved) if id(each) not in own), None)
        if foreign is not None:
            _refuse(
                f"layer {n} reads {kind_of(foreign)} that requires a gradient, and is neither its parameter nor among "
                "its arguments",
                "Give it to all blocks as an argument, or make it a parameter or submodule of the blocks",
            )
        left = next(((name, each) for name, each in _kept(layers) if id(each) not in kept), None)
        if left is not None:
            _refuse(
                f"layer {n} leaves {kind_of(left[1])} with a gradient in its attribute '{left[0]}'",
                "Detach it there, or compute what the loss reads from the states between the blocks",
            )
        if _drawn() != drawn:
            _refuse(f"layer {n} draws random numbers of Python's or numpy's", "Draw them by torch")


def _refuse(what: str, advice: str) -> None:
    raise ConfigError(
        f"parallel.part: {what}; expected layers that are functions of their state, parameters and arguments, since "
        f"multigrid evaluates each many times. {advice}, or name other layers as the part."
    )


def _drawn() -> object:
    return random.getstate(), repr(np.random.get_state())


def _sources(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the leaves with a gradient from which a tensor was computed."""
    waiting: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [each for each, _ in node.next_functions]


def _kept(layers: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the computed tensors with a gradient in attributes of modules that are neither parameters nor buffers."""
    for module in layers.modules():
        for name, value in module.__dict__.items():
            if name.startswith("_") and name in _INTERNAL:
                continue
            found = (value,) if isinstance(value, Tensor) else tree_leaves(value) if type(value) in _PLAIN else ()
            yield from ((name, each) for each in found if isinstance(each, Tensor) and each.grad_fn is not None)


_PLAIN = (list, tuple, dict)
_INTERNAL = frozenset(nn.Module().__dict__)
