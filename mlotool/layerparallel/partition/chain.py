"""A module as a chain of layers, where it may be cut, and what its parts cost in a training step."""

import inspect
import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate, pairwise
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.private import TorchDispatchMode, packet_of, schema_of, tree_leaves
from mlotool.layerparallel.partition import trace
from mlotool.layerparallel.partition.trace import LAYERS, Inputs, Stage, undisturbed

# Names of the layers that begin the stages 1 .. K-1; `measured`: balanced by time; None: by counted operations.
Cut = Sequence[str] | Literal["measured"] | None

MEASURED = "measured"

# Floating-point operations in the time in which one number is read or written, fitted to the layers of a ResNet-18 and
# of a transformer on a CPU (float32, one thread: 13); it weighs norms, activations and embeddings against products.
ELEMENT_COST = 16

NUM_TIMINGS = 3

# `measure(run, device)`: what it costs to call `run`.
Measure = Callable[[Callable[[], Any], torch.device], float]


class OperationCounter(TorchDispatchMode):
    """Counts what is computed while it is entered, backward passes included.

    Attributes:
        products: floating-point operations of convolutions, products of matrices and attention.
        elements: numbers that all operations read and write.

    Example:
        >>> with OperationCounter() as counter:
        ...     _ = (torch.ones(2, 3) @ torch.ones(3, 4)).relu()
        >>> counter.products, counter.elements  # relu: 8 in, 8 out; the product: 6 and 12 in, 8 out; two ones
        (48, 60)
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count one operation; a view costs nothing."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        aliases = [output.alias_info for output in schema_of(func).returns]
        if all(alias is None or alias.is_write for alias in aliases):
            count = flop_registry.get(packet_of(func))
            self.products += int(count(*args, **kwargs, out_val=result)) if count is not None else 0
            leaves = tree_leaves((args, kwargs, result))
            self.elements += sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
        return result


def operations(run: Callable[[], Any], device: torch.device) -> int:
    """Return the operations of a call: the same on each machine.

    Args:
        run: is called once.
        device: on which it computes; not looked at.

    Example:
        >>> operations(lambda: torch.ones(4), torch.device("cpu"))
        64
    """
    with OperationCounter() as counter:
        run()
    return counter.products + ELEMENT_COST * counter.elements


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call, the least of a few.

    Args:
        run: is called a few times.
        device: on which it computes.

    Example:
        >>> seconds(lambda: None, torch.device("cpu")) < 1
        True
    """
    times = []
    for _ in range(NUM_TIMINGS + 1):
        _wait(device)
        begin = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - begin)
    # The first call finds its kernels.
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Chain:
    """A module's forward pass as a chain of layers. It may be cut before a layer where only one tensor goes on.

    Parameters may be used on both sides of a cut, as by a head that is tied to the embedding.

    Args:
        module: blocks (children of a Sequential, ModuleList or ModuleDict), each layer of `Layers`, and torch's own
            layers are not looked into.
        key: the setting that the module belongs to, for messages.
        inputs: a batch, in the order of the forward's arguments: its Python code may then decide by values, such as in
            a check of the inputs' shape, and costs are known. None: by none.
        inside: names of blocks; only modules that hold one of them are looked into, and all others are blocks.
        opened: names of blocks that are looked into like the module itself.

    Attributes:
        names: the layers that may begin a stage, in order.

    Raises:
        ConfigError: it cannot be traced.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> chain = Chain(net, inputs=(torch.zeros(1, 2),))
        >>> chain.names, chain.balance(num_stages=2)
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
        self._module = nn.Sequential(OrderedDict(layers=module)) if trace.has_layers(module) else module
        self._inputs, self._key, self._opened = inputs, key, frozenset(opened)
        self._costs: dict[tuple[tuple[str, ...], Measure], list[float]] = {}
        self._graph = trace.traced(self._module, key, inputs, inside, self._opened)
        self._nodes = [node for node in self._graph.nodes if node.op not in ("placeholder", "output")]
        self._recomputed = trace.recomputed(self._nodes)
        self._positions = self._find_positions()
        begins = [(self._nodes[position].target, _layers_of(self._nodes[position])) for position in self._positions]
        # Equal layers are called by what they begin with.
        self.names = [f"{target}" if layers is None else f"{target}.{layers.start}" for target, layers in begins]

    def finer(self, opened: Iterable[str]) -> "Chain | None":
        """Return the same module's chain with further blocks looked into, if it can be traced."""
        with suppress(ConfigError):
            return Chain(self._module, self._key, self._inputs, opened=self._opened | frozenset(opened))
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
        most, places = len(self.names) + 1, ", ".join(self.names) or "no layer"
        expected = f"at most {most}, since {type(self._module).__name__} can be cut only before {places}"
        require(num_stages <= most, f"{self._key}: stages", num_stages, expected, f"Set stages={most}.")
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

    def balance(self, num_stages: int, measure: Measure = operations) -> list[str]:
        """Return the cuts into stages whose most expensive one costs least.

        Args:
            num_stages: at most one more than `names`.
            measure: `operations`, the same in each run, or `seconds`, those of this machine.
        """
        return balanced(self.costs(self.names, measure), self.names, num_stages)

    def costs(self, cut: Sequence[str], measure: Measure = operations) -> list[float]:
        """Return what the stages between cuts cost in a training step: a forward and a backward pass of a batch.

        What was measured before is not measured again.

        Args:
            cut: names of `names`, in order.
            measure: as for `balance`.
        """
        advice = "Give the module's input, or a tuple of its inputs, or set cut to the layers that begin stages."
        require(self._inputs is not None, f"{self._key}.example", None, "a batch, by which stages are balanced", advice)
        assert self._inputs is not None
        if (place := (tuple(cut), measure)) in self._costs:
            return self._costs[place]
        device = next((parameter.device for parameter in self._module.parameters()), torch.device("cpu"))
        costs: list[float] = []
        state: Any = None
        for part in self.stages(cut):
            with undisturbed(self._module):
                costs.append(measure(partial(part.pass_both_ways, state, self._inputs), device))
            with undisturbed(self._module), torch.no_grad():
                state = part(state, self._inputs)
        self._costs[place] = costs
        return costs

    def closed(self, position: int) -> list[str]:
        """Return the blocks with blocks of their own in the part at a position: 0 is that before the first cut."""
        kinds = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

        def holds_blocks(layer: str) -> bool:
            modules = self._module.get_submodule(layer).modules()
            return any(isinstance(module, kinds) and len(module) > 1 for module in modules)

        return [layer for layer in self.stages(self.names)[position].layers if holds_blocks(layer)]

    def _find_positions(self) -> list[int]:
        positions = []
        for position, node in enumerate(self._nodes):
            is_layer = node.op == "call_module" and [*self._module.get_submodule(str(node.target)).parameters()]
            if not is_layer or len(self._passing(position)) != 1:
                continue
            before, after = self._nodes[:position], self._nodes[position:]
            # Parameters on both sides are shared. Of a layer's buffers on both sides there would be two.
            is_shared = not _moved(self._module, before).isdisjoint(_moved(self._module, after))
            if trace.tensors_of(self._module, before) and not is_shared:
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
    left_out = LAYERS if trace.has_layers(module) else None
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
    sums = [0.0, *accumulate(costs)]

    @cache
    def best(num_links: int, count: int) -> tuple[float, float, tuple[int, ...]]:
        """Return the largest cost of so many stages of the first links, the sum of squares, and minus the cuts."""
        if count == 1:
            return sums[num_links], sums[num_links] ** 2, ()
        ways = []
        for begin in range(count - 1, num_links):
            (largest, squares, cuts), last = best(begin, count - 1), sums[num_links] - sums[begin]
            ways.append((max(largest, last), squares + last**2, (*cuts, -begin)))
        return min(ways)

    return [names[-cut - 1] for cut in best(len(costs), num_stages)[2]]


# Times that heavy blocks are looked into, one within the other.
DEPTH = 6

# Of the longest stage over the mean; above it the run warns.
LARGEST_IMBALANCE = 1.3

_log = logging.getLogger("mlotool")


def chain_for(
    module: nn.Module, key: str, inputs: Inputs | None, cut: Sequence[str] | None, num_stages: int | None = None
) -> Chain:
    """Return the chain of a module that is called with these inputs.

    Args:
        module: to be cut.
        key: the setting that the module belongs to, for messages.
        inputs: a batch, in the order of the forward's arguments; None: nothing is known of it.
        cut: names of the blocks that begin stages. What holds them is looked into; where not all of the module can be
            traced, only that is.
        num_stages: K. Blocks with blocks of their own are looked into while K stages cannot be balanced. None leaves
            them whole.

    Raises:
        ConfigError: the module cannot be traced.

    Example:
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(2, 2, 4, batch_first=True), num_layers=3)
        >>> chain_for(encoder, "parallel", bound(encoder, [torch.zeros(1, 5, 2)], {}), cut=None).names
        ['layers.1', 'layers.2']
    """
    try:
        chain = Chain(module, key, inputs)
    except ConfigError:
        if not cut:
            raise
        chain = Chain(module, key, inputs, inside=cut)
    if cut is not None:
        try:
            chain.resolve(len(cut) + 1, cut)
        except ConfigError:
            # What holds the blocks may be one itself.
            parents = {name[:end] for name in cut for end in range(len(name)) if name[end] == "."}
            return chain.finer(parents) or chain
        return chain
    best = _imbalance_of(chain, num_stages)
    for _ in range(DEPTH):
        if best <= LARGEST_IMBALANCE:
            break
        costs = chain.costs(chain.names)
        other = chain.finer(chain.closed(costs.index(max(costs))))
        reached = inf if other is None else _imbalance_of(other, num_stages)
        if other is None or reached > best or (reached == best and len(other.names) <= len(chain.names)):
            break
        chain, best = other, reached
    return chain


def _imbalance_of(chain: Chain, num_stages: int | None) -> float:
    if num_stages is None or num_stages == 1:
        return 1.0
    too_few = len(chain.names) < num_stages - 1
    return inf if too_few else imbalance(chain.costs(chain.balance(num_stages)))


def balanced_cut(chain: Chain, num_stages: int, cut: Cut, key: str) -> list[str]:
    """Return the names of the layers that begin the stages 1 .. K-1, and say how well the stages are balanced.

    Args:
        chain: the module.
        num_stages: K.
        cut: what the user has set.
        key: of the setting, for messages.

    Raises:
        ConfigError: the module has fewer places to cut than needed, or no such layers.

    Example:
        >>> chain = Chain(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), inputs=(torch.zeros(4, 8),))
        >>> balanced_cut(chain, 2, None, "parallel")
        ['2']
    """
    names = chain.resolve(num_stages, cut)
    if num_stages == 1:
        return []
    measure: Measure = seconds if cut == MEASURED else operations
    names = names or chain.balance(num_stages, measure)
    reached = imbalance(chain.costs(names, measure))
    listed = ", ".join(names)
    message = (
        "%s: the stages begin at the input, %s; the longest has %.2f times the mean cost. To use the same cuts again, "
        "set "
    )
    _log.info(f"{message} cut: [%s].", key, listed, reached, listed)
    if reached > LARGEST_IMBALANCE:
        balanced = chain.balance(num_stages, measure)
        is_better = imbalance(chain.costs(balanced, measure)) < reached
        advice = f"Set cut: [{', '.join(balanced)}]." if is_better else "Set fewer stages, or smaller blocks."
        fault = f"{key}.cut: the longest of {num_stages} stages (they begin at the input, {listed}) takes {reached:.2f}"
        message = (
            f"{fault} times their mean; expected at most {LARGEST_IMBALANCE}, since all stages wait for the longest. "
            f"{advice}"
        )
        warnings.warn(message, stacklevel=2)
    return names


def imbalance(costs: Sequence[float]) -> float:
    """Return the cost of the most expensive stage over the mean: 1 is a perfect balance.

    Example:
        >>> imbalance([1.0, 3.0])
        1.5
    """
    return max(costs) * len(costs) / (sum(costs) or 1.0)


def partition(module: nn.Module, num_stages: int, cut: Sequence[str] | None = None, example: Any = None) -> list[Stage]:
    """Cut a module into stages which, one after the other, are the module bit for bit.

        module(x) = stage_{K-1}(... stage_1(stage_0(None, (x,)), (x,)) ..., (x,))

    Residual networks (ours, torchvision's), transformers, any `nn.Sequential`: the forward is traced, and may be cut
    before every layer or block that is reached by one tensor alone; stages may change its shape, and may share
    parameters.

    Args:
        module: whose layers the stages run.
        num_stages: K.
        cut: names of the layers or groups of layers that begin the stages 1 .. K-1; None balances the operations of
            a training step with `example`.
        example: the module's input, or a tuple of its inputs; needed where `cut` is None, and where the forward's
            Python code decides by values.

    Raises:
        ConfigError: the module cannot be traced, has fewer blocks than stages, or no such layers.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> [stage.layers for stage in partition(net, 2, example=torch.zeros(1, 2))]
        [['0', '1'], ['2', '3', '4']]
    """
    args = example if isinstance(example, tuple) else (example,)
    chain = chain_for(module, "partition", None if example is None else bound(module, args, {}), cut, num_stages)
    names = chain.resolve(num_stages, cut)
    if names is None:
        names = chain.balance(num_stages) if num_stages > 1 else []
    return chain.stages(names)
