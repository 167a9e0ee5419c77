"""A module as a chain of stages, each of which goes on where the one before has stopped."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from mlotool.core.arguments import is_whole, require
from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean

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
        used = _tensors(module, graph.nodes)
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


class Chain:
    """A module's forward, traced, and where it may be cut: where one tensor alone goes on, and a layer begins.

    Args:
        module: its forward must be traceable by torch.fx, with blocks (children of a Sequential, ModuleList or
            ModuleDict) and torch's own layers as black boxes.
        key: of the module, for messages.

    Attributes:
        names: the layers that may begin a stage, in order.

    Raises:
        ConfigError: it cannot be traced.
    """

    def __init__(self, module: nn.Module, key: str = "module") -> None:
        self._module = module
        self._key = key
        self._signature = inspect.signature(module.forward)
        self._graph = _traced(module, key)
        self._nodes = [node for node in self._graph.nodes if node.op not in ("placeholder", "output")]
        self._recomputed = _recomputed(self._nodes)
        self._positions = self._find_positions()
        self.names = [str(self._nodes[position].target) for position in self._positions]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
        """Return what the module is called with in the order of its forward's arguments."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def stages(self, cut: Sequence[str]) -> list[Stage]:
        """Return the stages between cuts.

        Args:
            cut: names of `names`, in order; each begins a stage.
        """
        position = dict(zip(self.names, self._positions, strict=True))
        bounds = [0, *(position[name] for name in cut), len(self._nodes)]
        return [Stage(self._module, self._part(begin, end), begin == 0) for begin, end in pairwise(bounds)]

    def resolve(self, cut: Sequence[str]) -> list[str]:
        """Return the layers that begin the stages; a name may be that of a group of layers.

        Raises:
            ConfigError: nothing may be cut there, or the names are not in the module's order.
        """
        found = []
        for name in cut:
            match = next((each for each in self.names if each == name or each.startswith(f"{name}.")), None)
            if match is None:
                raise ConfigError(
                    f"{self._key}: found the cut {name!r}; expected one of {', '.join(self.names)}."
                    f"{did_you_mean(name, self.names)} Correct the name, or set cut to null to cut by cost."
                )
            found.append(match)
        if sorted(set(found), key=self.names.index) != found:
            raise ConfigError(
                f"{self._key}: found the cuts {list(cut)}; expected each once, in the order of the module. "
                "Sort the names."
            )
        return found

    def balance(self, num_stages: int, inputs: Inputs) -> list[str]:
        """Return the cuts into stages whose most expensive one costs least.

        Args:
            num_stages: at most one more than `names`.
            inputs: an example, of which the first sample is run.

        Cost: one forward pass of one sample, counted in floating-point operations (convolutions and products of
        matrices), so that every process cuts alike.
        """
        return _balanced([self.costs(inputs)[name] for name in ("", *self.names)], self.names, num_stages)

    def costs(self, inputs: Inputs) -> dict[str, int]:
        """Return the operations from each possible cut to the next one; those before the first are of ''."""
        found, state = {}, None
        with at_rest(self._module):
            for name, part in zip(("", *self.names), self.stages(self.names), strict=True):
                with FlopCounterMode(display=False) as counter:
                    state = part(state, first_sample(inputs))
                found[name] = counter.get_total_flops()
        return found

    def check(self, num_stages: int, cut: Sequence[str] | None) -> None:
        """Raise ConfigError where the module cannot be cut into so many stages."""
        if num_stages > len(self.names) + 1:
            raise ConfigError(
                f"{self._key}: found {num_stages} stages; expected at most {len(self.names) + 1}, since "
                f"{type(self._module).__name__} may be cut before {', '.join(self.names) or 'no layer'} alone. "
                f"Set stages={len(self.names) + 1}."
            )
        if cut is not None and len(cut) != num_stages - 1:
            raise ConfigError(
                f"{self._key}: found {num_stages} stages and {len(cut)} cuts; expected one cut less than stages. "
                f"Set stages={len(cut) + 1}, or cut=null to cut by cost."
            )

    def _find_positions(self) -> list[int]:
        nodes, found = self._nodes, []
        for position, node in enumerate(nodes):
            before, after = nodes[:position], nodes[position:]
            if not _begins_stage(self._module, node) or len(self._passing(position)) != 1:
                continue
            used, later = (_tensors(self._module, part) for part in (before, after))
            # A tensor on both sides would belong to two stages.
            if used and used.isdisjoint(later):
                found.append(position)
        return found

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
        return part

    def _needed(self, own: Sequence[fx.Node], result: fx.Node) -> list[fx.Node]:
        """Return the earlier values that a part computes again, in order."""
        needed: set[fx.Node] = set()
        waiting = [*own, result]
        while waiting:
            for each in waiting.pop().all_input_nodes:
                if each in self._recomputed and each not in needed and each not in own:
                    needed.add(each)
                    waiting.append(each)
        return [node for node in self._nodes if node in needed]


def partition(
    module: nn.Module,
    num_stages: int,
    cut: Sequence[str] | None = None,
    example: Any = None,
) -> list[Stage]:
    """Cut a module into stages which, one after the other, are the module bit for bit.

        module(x) = stage_{K-1}(... stage_1(stage_0(None, (x,)), (x,)) ..., (x,))

    Residual networks (ours, torchvision's), transformers built of blocks, any `nn.Sequential`: the forward is traced,
    and may be cut before every layer or block that is reached by one tensor alone; stages may change its shape.

    Args:
        module: whose layers the stages run.
        num_stages: K.
        cut: names of the layers or groups of layers that begin the stages 1 .. K-1; None balances the floating-point
            operations of one sample of `example`.
        example: the module's input, or a tuple of its inputs; needed where `cut` is None.

    Raises:
        ConfigError: the module cannot be traced, has fewer blocks than stages, or no such layers.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> [stage.layers for stage in partition(net, 2, example=torch.zeros(1, 2))]
        [['0', '1'], ['2', '3', '4']]
    """
    require(isinstance(module, nn.Module), "partition.module", module, "an nn.Module", "Give one that is built.")
    is_right = is_whole(num_stages, 1)
    require(is_right, "partition.num_stages", num_stages, "a whole number of at least 1", "Write num_stages=2.")
    is_right = cut is None or (isinstance(cut, list | tuple) and all(isinstance(each, str) for each in cut))
    require(is_right, "partition.cut", cut, "names of layers or null", "Write cut=['2'].")
    chain = Chain(module)
    chain.check(num_stages, cut)
    if cut is not None or num_stages == 1:
        return chain.stages(chain.resolve(cut or ()))
    advice = "Give the module's input, or a tuple of its inputs, or set cut to the layers that begin stages."
    inputs = example if isinstance(example, tuple) else (example,)
    is_right = any(isinstance(each, Tensor) for each in inputs)
    require(is_right, "partition.example", example, "a tensor, by which stages are balanced", advice)
    try:
        return chain.stages(chain.balance(num_stages, chain.bind(inputs, {})))
    except Exception as error:  # it runs the user's layers
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        require(False, "partition.example", example, f"an input that {type(module).__name__} takes ({reason})", advice)
        raise


def first_sample(inputs: Inputs) -> Inputs:
    """Return the inputs of the first sample, as a batch of one."""
    return tuple(each[:1] if isinstance(each, Tensor) and each.ndim else each for each in inputs)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Blocks are leaves: what they do inside need not be traceable, and is not for a cut."""
        if super().is_leaf_module(m, module_qualified_name):
            return True
        assert isinstance(self.root, nn.Module)
        parent = self.root.get_submodule(module_qualified_name.rpartition(".")[0])
        return isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict) and not isinstance(m, nn.Sequential)


def _traced(module: nn.Module, key: str) -> fx.Graph:
    try:
        graph = _Tracer().trace(module)
        open_ended = [str(node.target) for node in graph.nodes if node.op == "placeholder" and "*" in str(node.target)]
        if open_ended:
            raise TypeError(f"forward takes {', '.join(open_ended)}")
    except Exception as error:  # tracing runs the user's forward on stand-ins, which may fail in any way
        raise ConfigError(
            f"{key}: the forward of {type(module).__name__} cannot be traced ({str(error).splitlines()[0]}); expected "
            "one whose steps depend on no value, but inside its blocks. Write it as an nn.Sequential of blocks, or "
            "with its blocks in an nn.ModuleList."
        ) from error
    return graph


def _recomputed(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the values that follow from the inputs without a layer, a parameter or a random number."""
    found: set[fx.Node] = set()
    for node in nodes:
        is_plain = node.op in ("call_function", "call_method") and "drop" not in node.name and "rand" not in node.name
        if is_plain and all(each.op == "placeholder" or each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def _tensors(module: nn.Module, nodes: Iterable[fx.Node]) -> set[int]:
    """Return the identities of the parameters and buffers that operations use."""
    found: set[int] = set()
    for node in nodes:
        if node.op == "get_attr":
            found.add(id(attrgetter(str(node.target))(module)))
        elif node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            found.update(id(each) for each in (*layer.parameters(), *layer.buffers()))
    return found


def _begins_stage(module: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and any(True for _ in module.get_submodule(str(node.target)).parameters())


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


def _balanced(costs: Sequence[int], names: Sequence[str], num_stages: int) -> list[str]:
    """Return the names before which to cut: smallest largest cost of a stage, then smallest sum of squares.

    Of equal cuts the latest is taken, since what costs nothing (a norm, an activation) belongs to what it follows.
    """
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # By the number of links in the first stages: (largest cost, sum of squares, cuts).
    best: dict[int, tuple[int, int, list[int]]] = {
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
                key=lambda found: (found[0], found[1], [-cut for cut in found[2]]),
            )
            for end in range(number, len(costs) + 1)
        }
    return [names[begin - 1] for begin in best[len(costs)][2]]
