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

    From stage to stage exactly one tensor passes, the state. What a later part needs of the module's inputs without any
    parameter, such as a mask of padding, that part computes again from the inputs.

    Args:
        module: the whole module; the stage runs its layers themselves, not copies.
        graph: the operations of the stage; its placeholders are the state (except in the first stage) and the inputs.
        is_first: whether the stage starts from the inputs alone.

    Attributes:
        parameters: those that the stage uses, by their names in the module.
        layers: names of the modules that it calls.

    Example:
        >>> from mlotool.layerparallel.partition.cut import partition
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> first, last = partition(net, num_stages=2, cut=["2"])
        >>> state = first(None, (torch.zeros(4, 2),))
        >>> state.shape, last(state, (torch.zeros(4, 2),)).shape, list(last.parameters)
        (torch.Size([4, 8]), torch.Size([4, 1]), ['2.weight', '2.bias'])
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
        """Return the next state (s, ...) of a batch of s samples; the last stage returns what the module returns.

        Args:
            state: (s, ...), where the stage before has stopped; the first stage does not look at it.
            inputs: of the whole module.
        """
        given = inputs if self.is_first else (state, *inputs)
        return self._interpreter.run(*given)

    @contextmanager
    def averaging(self, count: int) -> Iterator[None]:
        """While it lasts, a pass averages BatchNorm's running statistics with those of `count` earlier collections.

        The first collection then leaves nothing of the initial statistics. Once `1 / (count + 1)` is below the layers'
        own momentum, that is in force.

        Args:
            count: passes that have collected the statistics before.
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
        """Return the stage's buffers themselves, by their names in the module."""
        prefixes = tuple(f"{layer}." for layer in self.layers)
        return {name: each for name, each in self._module.named_buffers() if name.startswith(prefixes)}


def first_sample(inputs: Inputs) -> Inputs:
    """Return the inputs of the first sample, as a batch of one: tensors (s, ...) become (1, ...), all else stays.

    Example:
        >>> x, scale = first_sample((torch.zeros(8, 3), 2.0))
        >>> x.shape, scale
        (torch.Size([1, 3]), 2.0)
    """
    return tuple(each[:1] if isinstance(each, Tensor) and each.ndim else each for each in inputs)


@contextmanager
def at_rest(module: nn.Module) -> Iterator[None]:
    """While it lasts, run a module in eval mode and without autograd: no buffer moves, and no random number is drawn.

    Each submodule is in its earlier mode again afterwards.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> with at_rest(net):
        ...     net.training, net(torch.ones(1, 2)).requires_grad
        (False, False)
        >>> net.training
        True
    """
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for child, was_training in modes:
            child.training = was_training


def tensors_of(module: nn.Module, nodes: Iterable[fx.Node]) -> set[int]:
    """Return the identities (`id`) of the parameters and buffers that operations of a traced module use.

    Args:
        module: that was traced.
        nodes: some of its operations.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> tensors_of(net, fx.symbolic_trace(net).graph.nodes) == {id(each) for each in net.parameters()}
        True
    """
    found: set[int] = set()
    for node in nodes:
        if node.op == "get_attr":
            found.add(id(attrgetter(str(node.target))(module)))
        elif node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            found.update(id(each) for each in (*layer.parameters(), *layer.buffers()))
    return found
