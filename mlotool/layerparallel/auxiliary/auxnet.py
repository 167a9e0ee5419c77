"""Small networks that give the auxiliary variables: a stage thinned out, or parts of a smaller module."""

import copy
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from mlotool.core.errors import ConfigError
from mlotool.layerparallel.partition.chain import Chain, chain_for
from mlotool.layerparallel.partition.stage import Inputs, Stage, undisturbed
from mlotool.layerparallel.partition.trace import LAYERS


class AuxNet(nn.Module):
    """A small network that gives auxiliary variables: parts that run one after the other.

    Args:
        parts: each is called with (state, *inputs), the first part of the first stage with the inputs alone; they are
            copied.
        is_first: whether the first part starts from the inputs.

    Example:
        >>> class Halved(nn.Module):
        ...     def forward(self, state, x):
        ...         return state / 2
        >>> AuxNet([Halved(), Halved()], is_first=False)(torch.ones(1, 2), (torch.zeros(1, 2),))
        tensor([[0.2500, 0.2500]])
    """

    def __init__(self, parts: Sequence[nn.Module], is_first: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(copy.deepcopy(part) for part in parts)
        self.is_first = is_first
        self.train()

    def forward(self, state: Tensor | None, inputs: Inputs) -> Tensor:
        """Return the state (s, ...) at the end of the last part.

        Args:
            state: (s, ...), where the first part begins; None where that starts from the inputs.
            inputs: of the whole module.
        """
        for number, part in enumerate(self.parts):
            state = part(*inputs) if number == 0 and self.is_first else part(state, *inputs)
        assert state is not None
        return state


def thinned_parts(stages: Sequence[Stage], inputs: Inputs, num_blocks: int) -> list[nn.Module]:
    """Return a thinned copy of each stage but the last one: most of the blocks that keep the shape are left out.

    Args:
        stages: all stages of a module.
        inputs: a batch.
        num_blocks: how many blocks that keep the shape each copy has at most; the first ones remain.

    Returns:
        K - 1 modules with the inputs and the output of the stages, and their parameters.

    Example:
        >>> from mlotool.layerparallel.partition.chain import partition
        >>> net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)])
        >>> parts = thinned_parts(partition(net, 2, ["4"]), (torch.zeros(1, 3),), num_blocks=1)
        >>> [len(list(part.parameters())) for part in parts]  # of one linear layer of four
        [2]
    """
    parts: list[nn.Module] = []
    state = None
    with undisturbed(stages[0].module), torch.no_grad():
        for stage in stages[:-1]:
            whole = fx.GraphModule(stage.module, stage.graph)
            state = ShapeProp(whole).propagate(*(inputs if stage.is_first else (state, *inputs)))
            parts.append(fx.GraphModule(stage.module, _thinned(whole, num_blocks)))
    return parts


def matching_parts(auxnet: nn.Module, shapes: Sequence[torch.Size], inputs: Inputs, key: str) -> list[nn.Module]:
    """Return parts of a smaller module, cut where its states have the shapes at the interfaces.

    Of several such places the one is taken whose share of the whole cost, in counted operations, is nearest to
    k / K at interface k of K stages.

    Args:
        auxnet: a module that takes the same inputs as the whole one.
        shapes: (...), of the states of one sample at the interfaces 1 .. K - 1.
        inputs: a batch.
        key: of the setting, for messages.

    Returns:
        K - 1 modules, from one interface to the next; the first starts from the inputs.

    Raises:
        ConfigError: the smaller module has no such states in this order.

    Example:
        >>> small = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 1))
        >>> [part] = matching_parts(small, [torch.Size([4])], (torch.zeros(1, 2),), "parallel.auxnet")
        >>> part(torch.zeros(5, 2)).shape
        torch.Size([5, 4])
    """
    chain = chain_for(auxnet, key, inputs, cut=None)
    costs, offered = chain.costs(chain.names), _shapes(chain, auxnet, inputs)
    before = dict(zip(chain.names, accumulate(costs), strict=False))
    cut: list[str] = []
    for number, shape in enumerate(shapes, start=1):
        begin = chain.names.index(cut[-1]) + 1 if cut else 0
        ends = [end for end in range(begin, len(offered)) if _follow(shapes[number:], offered[end + 1 :])]
        fitting = [chain.names[end] for end in ends if offered[end] == shape]
        if not fitting:
            places = "; ".join(f"{name}: {list(size)}" for name, size in zip(chain.names, offered, strict=True))
            found = f"has no place for interface {number} of {len(shapes)} (a state of shape {list(shape)})"
            advice = "Give a smaller network of the same widths, or set auxnet to null for thinned stages."
            raise ConfigError(f"{key}: {type(auxnet).__name__} {found}; it has {places or 'none'}. {advice}")
        wanted = sum(costs) * number / (len(shapes) + 1)
        cut.append(min(fitting, key=lambda name: abs(before[name] - wanted)))
    return [fx.GraphModule(stage.module, stage.graph) for stage in chain.stages(cut)[:-1]]


def _follow(shapes: Sequence[torch.Size], offered: Sequence[torch.Size]) -> bool:
    """Say whether shapes are among those that are offered, in this order."""
    rest = iter(offered)
    return all(shape in rest for shape in shapes)


def _shapes(chain: Chain, module: nn.Module, inputs: Inputs) -> list[torch.Size]:
    """Return the shape of a sample's state at each possible cut."""
    state, shapes = None, []
    with undisturbed(module), torch.no_grad():
        for stage in chain.stages(chain.names)[:-1]:
            state = stage(state, inputs)
            shapes.append(state.shape[1:])
    return shapes


def _thinned(module: fx.GraphModule, num_blocks: int) -> fx.Graph:
    """Return a copy with the first so many of the blocks; what another is given goes on in place of its result."""
    copies: dict[fx.Node, fx.Node] = {}
    thinned = fx.Graph()
    thinned.output(thinned.graph_copy(module.graph, copies))
    for block in filter(partial(_is_block, module), module.graph.nodes):
        copy, layers = copies[block], block.kwargs.get(LAYERS)
        if isinstance(layers, range) and num_blocks:
            copy.kwargs = {LAYERS: layers[:num_blocks]}
        elif num_blocks <= 0:
            # Of the copy: what it is given may itself stand in for a block that has gone.
            copy.replace_all_uses_with(copy.all_input_nodes[0])
            thinned.erase_node(copy)
        num_blocks = max(0, num_blocks - (len(layers) if isinstance(layers, range) else 1))
    return thinned


def _is_block(module: fx.GraphModule, node: fx.Node) -> bool:
    """Say whether a node is a layer with a matrix that keeps the shape of what it is given."""
    if node.op != "call_module" or not node.all_input_nodes:
        return False
    before, after = (getattr(each.meta.get("tensor_meta"), "shape", None) for each in (node.all_input_nodes[0], node))
    has_matrix = any(parameter.ndim > 1 for parameter in module.get_submodule(str(node.target)).parameters())
    return before is not None and before == after and has_matrix
