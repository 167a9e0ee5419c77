"""A part of a module between two cuts."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from mlotool.core.bound_module import Slots
from mlotool.core.private import BatchNorm as _BatchNorm
from mlotool.core.private import tree_leaves

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
        module: the whole module.
        parameters: those that the stage uses, by their names in the module.
        layers: names of the modules that it calls.

    Example:
        >>> from mlotool.layerparallel.partition.chain import partition
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> first, last = partition(net, 2, cut=["2"])
        >>> state = first(None, (torch.zeros(4, 2),))
        >>> state.shape, last(state, (torch.zeros(4, 2),)).shape, list(last.parameters)
        (torch.Size([4, 8]), torch.Size([4, 1]), ['2.weight', '2.bias'])
    """

    def __init__(self, module: nn.Module, graph: fx.Graph, is_first: bool) -> None:
        self.graph = graph
        self.is_first = is_first
        self.layers = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        used = tensors_of(module, graph.nodes)
        self.parameters = {name: parameter for name, parameter in module.named_parameters() if id(parameter) in used}
        self.module = module
        self._interpreter = fx.Interpreter(module, graph=graph)

    def __call__(self, state: Tensor | None, inputs: Inputs) -> Any:
        """Return the next state (s, ...) of a batch of s samples; the last stage returns what the module returns.

        Args:
            state: (s, ...), where the stage before has stopped; the first stage does not look at it.
            inputs: of the whole module.
        """
        return self._interpreter.run(*(inputs if self.is_first else (state, *inputs)))

    def pass_both_ways(self, state: Tensor | None, inputs: Inputs) -> None:
        """Run the stage forward and backward, and forget what it finds: the work of a training step.

        Args:
            state: as for a call.
            inputs: as for a call.
        """
        with torch.enable_grad():
            begin = None if state is None else state.detach()
            if begin is not None and begin.is_floating_point():
                begin.requires_grad_()
            ends = [end for end in tree_leaves(self(begin, inputs)) if isinstance(end, Tensor) and end.requires_grad]
        points = [point for point in (begin, *self.parameters.values()) if point is not None and point.requires_grad]
        if ends and points:
            torch.autograd.grad(ends, points, list(map(torch.ones_like, ends)), allow_unused=True)

    @contextmanager
    def averaging(self, count: int) -> Iterator[None]:
        """While it lasts, a pass averages BatchNorm's running statistics with those of `count` earlier collections.

        The first collection then leaves nothing of the initial statistics. Once `1 / (count + 1)` is below the layers'
        own momentum, that is in force.

        Args:
            count: passes that have collected the statistics before.
        """
        layers = (self.module.get_submodule(layer) for layer in self.layers)
        norms = [norm for layer in layers for norm in layer.modules() if isinstance(norm, _BatchNorm)]
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
        return {name: buffer for name, buffer in self.module.named_buffers() if name.startswith(prefixes)}


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """While it lasts, run a module as it trains, and leave no trace: its buffers and random numbers are put back.

    Example:
        >>> norm = nn.BatchNorm1d(1)
        >>> with undisturbed(norm):
        ...     _ = norm(torch.ones(4, 1))
        >>> norm.running_mean
        tensor([0.])
    """
    places = Slots(module)
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers()) if tensor.is_cuda}
    with torch.random.fork_rng(sorted(device.index or 0 for device in devices)), ExitStack() as stack:
        stack.callback(places.fill({}, places.copy_buffers()))
        yield


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
    tensors: list[Any] = []
    for node in nodes:
        if node.op == "get_attr":
            tensors.append(attrgetter(str(node.target))(module))
        elif node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            tensors += [*layer.parameters(), *layer.buffers()]
    return set(map(id, tensors))
