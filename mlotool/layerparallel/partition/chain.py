"""A module as a chain of layers, and where it may be cut."""

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import fx, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.layerparallel.partition.costs import Measure, operations
from mlotool.layerparallel.partition.stage import Inputs, Stage, tensors_of, undisturbed
from mlotool.layerparallel.partition.trace import LAYERS, has_layers, recomputed, traced

Cut = Sequence[str] | Literal["measured"] | None
"""Names of the layers that begin the stages 1 .. K-1; `measured`: balanced by time; None: by counted operations."""

MEASURED = "measured"


class Chain:
    """A module's forward pass as a chain of layers. It may be cut before a layer where only one tensor goes on.

    Parameters may be used on both sides of a cut, as by a head that is tied to the embedding.

    Args:
        module: blocks (children of a Sequential, ModuleList or ModuleDict), each layer of `Layers`, and torch's own
            layers are not looked into.
        key: the setting that the module belongs to, for messages.
        inputs: a batch, in the order of the forward's arguments: its Python code may then decide by values, such as in
            a check of the inputs' shape. None: by none.
        inside: names of blocks; only modules that hold one of them are looked into, and all others are blocks.
        opened: names of blocks that are looked into like the module itself.

    Attributes:
        names: the layers that may begin a stage, in order.

    Raises:
        UntraceableError: the forward decides by values, and there are no inputs.
        ConfigError: it cannot be traced with them either.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> chain = Chain(net)
        >>> chain.names, chain.balance(num_stages=2, inputs=(torch.zeros(1, 2),))
        (['2', '4'], ['2'])
        >>> first, second = chain.stages(["2"])
        >>> x = torch.ones(3, 2)
        >>> torch.equal(second(first(None, (x,)), (x,)), net(x))
        True
    """

    def __init__(
        self,
        module: nn.Module,
        key: str = "module",
        inputs: Inputs | None = None,
        inside: Sequence[str] | None = None,
        opened: Iterable[str] = (),
    ) -> None:
        # Equal layers are held by another module, so that their calls have a name.
        self._module = nn.Sequential(OrderedDict(layers=module)) if has_layers(module) else module
        self._key, self._opened = key, frozenset(opened)
        self._graph = traced(self._module, key, inputs, inside, self._opened)
        self._nodes = [node for node in self._graph.nodes if node.op not in ("placeholder", "output")]
        self._recomputed = recomputed(self._nodes)
        self._positions = self._find_positions()
        begins = [(self._nodes[position].target, _layers_of(self._nodes[position])) for position in self._positions]
        # Equal layers are called by what they begin with.
        self.names = [f"{target}" if layers is None else f"{target}.{layers.start}" for target, layers in begins]

    @property
    def may_be_finer(self) -> bool:
        """Whether there may be more places to cut beside a batch: by its sizes, or within blocks."""
        asks_for_sizes = any(
            node.target in ("size", "dim") or (node.target is getattr and node.args[1] in ("shape", "device", "dtype"))
            for node in self._nodes
        )
        return asks_for_sizes or any(map(self.closed, ("", *self.names)))

    def finer(self, inputs: Inputs, opened: Iterable[str]) -> "Chain | None":
        """Return the same module's chain, traced beside these inputs, with further blocks looked into, if it can be."""
        with suppress(ConfigError):
            return Chain(self._module, self._key, inputs, opened=self._opened | frozenset(opened))
        return None

    def stages(self, cut: Sequence[str]) -> list[Stage]:
        """Return the stages between cuts.

        Args:
            cut: names of `names`, in order; each begins a stage.
        """
        position = dict(zip(self.names, self._positions, strict=True))
        bounds = [0, *(position[name] for name in cut), len(self._nodes)]
        return [Stage(self._module, self._part(begin, end), begin == 0) for begin, end in pairwise(bounds)]

    def resolve(self, num_stages: int, cut: Cut) -> list[str] | None:
        """Return the layers that begin the stages, where a user has named them; None where they are to be balanced.

        Args:
            num_stages: K.
            cut: what the user has set; a name may be that of a group of layers.

        Raises:
            ConfigError: the module has fewer places to cut than needed, or no such layers in this order.
        """
        if num_stages > len(self.names) + 1:
            raise ConfigError(
                f"{self._key}: found {num_stages} stages; expected at most {len(self.names) + 1}, since "
                f"{type(self._module).__name__} may be cut before {', '.join(self.names) or 'no layer'} alone. "
                f"Set stages={len(self.names) + 1}."
            )
        if cut is None or isinstance(cut, str):
            return None
        key = f"{self._key}.cut"
        require(len(cut) == num_stages - 1, key, cut, f"{num_stages - 1} names for {num_stages} stages, or null")
        layers: list[str] = []
        for name in cut:
            fitting = [layer for layer in self.names if layer == name or layer.startswith(f"{name}.")]
            advice = f"{did_you_mean(name, self.names)} Correct the name, or set cut to null.".strip()
            require(bool(fitting), key, name, f"one of {', '.join(self.names)}", advice)
            layers.append(fitting[0])
        require(sorted(set(layers), key=self.names.index) == layers, key, cut, "each once, in the order of the module")
        return layers

    def balance(self, num_stages: int, inputs: Inputs, measure: Measure = operations) -> list[str]:
        """Return the cuts into stages whose most expensive one costs least.

        Args:
            num_stages: at most one more than `names`.
            inputs: a batch.
            measure: `operations`, the same in each run, or `seconds`, those of this machine.
        """
        costs = self.costs(inputs, measure)
        return balanced([costs[name] for name in ("", *self.names)], self.names, num_stages)

    def costs(self, inputs: Inputs, measure: Measure = operations) -> dict[str, float]:
        """Return what each part costs from a possible cut to the next; '' is that before the first cut.

        Args:
            inputs: as for `balance`.
            measure: as for `balance`.
        """
        return dict(zip(("", *self.names), self.costs_of(self.names, inputs, measure), strict=True))

    def costs_of(self, cut: Sequence[str], inputs: Inputs, measure: Measure = operations) -> list[float]:
        """Return what the stages between cuts cost in a training step: a forward and a backward pass of a batch.

        Args:
            cut: names of `names`, in order.
            inputs: as for `balance`.
            measure: as for `balance`.
        """
        device = next((parameter.device for parameter in self._module.parameters()), torch.device("cpu"))
        costs: list[float] = []
        state: Any = None
        for part in self.stages(cut):
            with undisturbed(self._module):
                costs.append(measure(partial(part.pass_both_ways, state, inputs), device))
            with undisturbed(self._module), torch.no_grad():
                state = part(state, inputs)
        return costs

    def closed(self, name: str) -> list[str]:
        """Return the blocks with blocks of their own that are called from one possible cut to the next.

        Args:
            name: of the layer there; '' is the part before the first cut.
        """
        part = dict(zip(("", *self.names), self.stages(self.names), strict=True))[name]
        kinds = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

        def holds_blocks(layer: str) -> bool:
            modules = self._module.get_submodule(layer).modules()
            return any(isinstance(module, kinds) and len(module) > 1 for module in modules)

        return [layer for layer in part.layers if holds_blocks(layer)]

    def _find_positions(self) -> list[int]:
        positions = []
        for position, node in enumerate(self._nodes):
            is_layer = node.op == "call_module" and [*self._module.get_submodule(str(node.target)).parameters()]
            if not is_layer or len(self._passing(position)) != 1:
                continue
            before, after = self._nodes[:position], self._nodes[position:]
            # Parameters on both sides are shared. Of a layer's buffers on both sides there would be two.
            is_shared = not _moved(self._module, before).isdisjoint(_moved(self._module, after))
            if tensors_of(self._module, before) and not is_shared:
                positions.append(position)
        return positions

    def _passing(self, position: int) -> list[fx.Node]:
        """Return the values that go on past a position and cannot be computed again from the inputs alone."""
        later = {*self._nodes[position:], *(node for node in self._graph.nodes if node.op == "output")}
        return [
            node
            for node in self._nodes[:position]
            if node not in self._recomputed and node.op != "get_attr" and not later.isdisjoint(node.users)
        ]

    def _part(self, begin: int, end: int) -> fx.Graph:
        part, copies = fx.Graph(), {}
        if begin:
            [state] = self._passing(begin)
            copies[state] = part.placeholder("state")
        for node in self._graph.nodes:
            if node.op == "placeholder":
                copies[node] = part.placeholder(node.name)
        own = self._nodes[begin:end]
        result = self._passing(end)[0] if end < len(self._nodes) else self._graph.output_node()
        for node in [*self._needed(own, result), *own]:
            copies[node] = part.node_copy(node, copies.__getitem__)
        part.output(fx.map_arg(result.args[0], copies.__getitem__) if result.op == "output" else copies[result])
        _join_layers(part)
        return part

    def _needed(self, own: Sequence[fx.Node], result: fx.Node) -> list[fx.Node]:
        """Return the earlier values that a part computes again, in order."""
        needed: set[fx.Node] = set()
        waiting = [*own, result]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                if source in self._recomputed and source not in needed and source not in own:
                    needed.add(source)
                    waiting.append(source)
        return [node for node in self._nodes if node in needed]


def bound(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
    """Return what a module is called with, in the order of its forward's arguments, defaults included.

    Example:
        >>> bound(nn.Linear(1, 1), [2.0], {})
        (2.0,)
    """
    arguments = inspect.signature(module.forward).bind(*args, **kwargs)
    arguments.apply_defaults()
    # Which of equal layers run is the stages' to say.
    left_out = LAYERS if has_layers(module) else None
    return tuple(value for name, value in arguments.arguments.items() if name != left_out)


def _layers_of(node: fx.Node) -> range | None:
    """Return which of equal layers a node calls; None where it does something else."""
    layers = node.kwargs.get(LAYERS)
    return layers if node.op == "call_module" and isinstance(layers, range) else None


def _join_layers(graph: fx.Graph) -> None:
    """Make one call of the calls of equal layers that follow each other."""
    for node in list(graph.nodes):
        before, last = node.args[0] if node.args else None, _layers_of(node)
        if last is None or not isinstance(before, fx.Node) or before.target != node.target:
            continue
        first = _layers_of(before)
        if first is not None and len(before.users) == 1 and first.stop == last.start:
            node.args, node.kwargs = before.args, {LAYERS: range(first.start, last.stop)}
            graph.erase_node(before)


def _moved(module: nn.Module, nodes: Sequence[fx.Node]) -> set[int]:
    """Return the identities of the buffers of layers that operations call, which they may write to."""
    layers = [module.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"]
    return {id(buffer) for layer in layers for buffer in layer.buffers()}


def balanced(costs: Sequence[float], names: Sequence[str], num_stages: int) -> list[str]:
    """Cut a chain of links into stages so that the most expensive stage costs as little as possible.

    Of cuts that do this equally well, those with the smallest sum of squared costs are taken, and of these the latest:
    what costs nothing (a norm, an activation) then belongs to the stage of what it follows.

    Args:
        costs: of each link, in any unit; one more than `names`.
        names: of all links but the first, which begins the first stage in any case.
        num_stages: K, at most the number of links.

    Returns:
        The names of the links that begin the stages 1 .. K-1.

    Example:
        >>> balanced([4, 1, 1, 2], ["b", "c", "d"], num_stages=2)
        ['b']
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # By the number of links in the first stages: (largest cost, sum of squares, cuts).
    best: dict[int, tuple[float, float, list[int]]] = {
        end: (sums[end], sums[end] ** 2, []) for end in range(1, len(costs) + 1)
    }
    for number in range(2, num_stages + 1):
        best = {
            end: min(
                (
                    (max(largest, last), squares + last**2, [*cuts, begin])
                    for begin, (largest, squares, cuts) in best.items()
                    if begin < end
                    for last in [sums[end] - sums[begin]]
                ),
                key=lambda way: (way[0], way[1], [-cut for cut in way[2]]),
            )
            for end in range(number, len(costs) + 1)
        }
    return [names[begin - 1] for begin in best[len(costs)][2]]
