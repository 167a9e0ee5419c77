"""A module as a chain of layers, and where it may be cut."""

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean
from mlotool.layerparallel.partition.balance import balanced
from mlotool.layerparallel.partition.stage import Inputs, Stage, at_rest, first_sample, tensors_of
from mlotool.layerparallel.partition.trace import recomputed, traced


class Chain:
    """A module's forward pass as a chain of layers. It may be cut before a layer where only one tensor goes on.

    Args:
        module: its forward must be traceable by torch.fx; blocks (children of a Sequential, ModuleList or
            ModuleDict) and torch's own layers are not looked into.
        key: the setting that the module belongs to, for messages.

    Attributes:
        names: the layers that may begin a stage, in order.

    Raises:
        ConfigError: the module cannot be traced.

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

    def __init__(self, module: nn.Module, key: str = "module") -> None:
        self._module = module
        self._key = key
        self._signature = inspect.signature(module.forward)
        self._graph = traced(module, key)
        self._nodes = [node for node in self._graph.nodes if node.op not in ("placeholder", "output")]
        self._recomputed = recomputed(self._nodes)
        self._positions = self._find_positions()
        self.names = [str(self._nodes[position].target) for position in self._positions]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
        """Return what the module is called with, in the order of its forward's arguments, defaults included."""
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
        return balanced([self.costs(inputs)[name] for name in ("", *self.names)], self.names, num_stages)

    def costs(self, inputs: Inputs) -> dict[str, int]:
        """Return the floating-point operations from each possible cut to the next; '' has those before the first cut.

        Args:
            inputs: an example, of which the first sample is run.
        """
        found, state = {}, None
        with at_rest(self._module):
            for name, part in zip(("", *self.names), self.stages(self.names), strict=True):
                with FlopCounterMode(display=False) as counter:
                    state = part(state, first_sample(inputs))
                found[name] = counter.get_total_flops()
        return found

    def check(self, num_stages: int, cut: Sequence[str] | None) -> None:
        """Refuse numbers of stages and cuts that do not fit the module or each other.

        Raises:
            ConfigError: the module has fewer places to cut than needed, or there is not one cut less than stages.
        """
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
            used, later = (tensors_of(self._module, part) for part in (before, after))
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


def _begins_stage(module: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and any(True for _ in module.get_submodule(str(node.target)).parameters())
