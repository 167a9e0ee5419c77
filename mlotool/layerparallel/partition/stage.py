"""A part of a module between two cuts."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

Inputs = tuple[Any, ...]
"""What a module is called with, in the order of its forward's arguments."""


class Stage:
    """A part of a module between two cuts.

    What later parts need of the module's inputs without any parameter (a mask of padding) is computed again from
    them, so exactly one tensor, the state, passes from stage to stage.

    Args:
        module: the whole one; the stage runs its layers themselves.
        graph: of the stage's operations; its placeholders are the state (but of the first stage) and the inputs.
        is_first: whether it starts from the inputs alone.

    Attributes:
        parameters: those that it uses, by their names in the module.
        layers: names of the modules that it calls.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph, is_first: bool) -> None:
        self.graph = graph
        self.is_first = is_first
        self.layers = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        used = tensors_of(module, graph.nodes)
        self.parameters = {name: each for name, each in module.named_parameters() if id(each) in used}
        self._module = module
        self._interpreter = fx.Interpreter(module, graph=graph)

    def __call__(self, state: Tensor | None, inputs: Inputs) -> Any:
        """Return the next state; of the last stage, what the module returns.

        Args:
            state: where the stage before has stopped; not looked at by the first one.
            inputs: of the whole module.
        """
        given = inputs if self.is_first else (state, *inputs)
        return self._interpreter.run(*given)

    @contextmanager
    def averaging(self, count: int) -> Iterator[None]:
        """Let running statistics be the mean of `count` earlier collections and the next, as long as they are few.

        A first collection then leaves nothing of the initial statistics, and later ones are BatchNorm's own.
        """
        layers = (self._module.get_submodule(layer) for layer in self.layers)
        norms = [each for layer in layers for each in layer.modules() if isinstance(each, _BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = None if norm.momentum is None else max(norm.momentum, 1.0 / (count + 1))
        try:
            yield
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum

    def buffers(self) -> dict[str, Tensor]:
        """Return its buffers as they are, by their names in the module."""
        prefixes = tuple(f"{layer}." for layer in self.layers)
        return {name: each for name, each in self._module.named_buffers() if name.startswith(prefixes)}


def first_sample(inputs: Inputs) -> Inputs:
    """Return the inputs of the first sample, as a batch of one."""
    return tuple(each[:1] if isinstance(each, Tensor) and each.ndim else each for each in inputs)


@contextmanager
def at_rest(module: nn.Module) -> Iterator[None]:
    """Run a module without a graph and in eval mode: no buffer moves, and no random number is drawn."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for child, was_training in modes:
            child.training = was_training


def tensors_of(module: nn.Module, nodes: Iterable[fx.Node]) -> set[int]:
    """Return the identities of the parameters and buffers that operations use."""
    found: set[int] = set()
    for node in nodes:
        if node.op == "get_attr":
            found.add(id(attrgetter(str(node.target))(module)))
        elif node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            found.update(id(each) for each in (*layer.parameters(), *layer.buffers()))
    return found
