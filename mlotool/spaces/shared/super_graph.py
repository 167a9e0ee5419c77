"""A shared graph as a function, of which each call computes one path or a mixture of several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function

from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown
from mlotool.core.private import current_dispatch_mode, is_functorch_wrapped_tensor, pytree
from mlotool.core.tracing import is_tracing
from mlotool.spaces.decisions import Value
from mlotool.spaces.tracing import nodes_in

MAX_PLANS = 4096


class Switch:
    """A node's function that stands for one of several other nodes, as a decision says.

    Args:
        decision: its name.
        values: the candidates that the nodes stand for, in their order.
    """

    __name__ = "choice"

    def __init__(self, decision: str, values: Sequence[Value]) -> None:
        self.decision, self.values = decision, tuple(values)

    def __call__(self, results: Sequence[object]) -> object:
        """Return the first result, for shapes: all are alike.

        Raises:
            ValueError: they are not.
        """
        kinds = [str(pytree.tree_map_only(Tensor, _kind, result)) for result in results]
        for value, kind in zip(self.values, kinds, strict=True):
            if kind != kinds[0]:
                raise ValueError(
                    f"the candidates of '{self.decision}' return different shapes, {self.values[0]} {kinds[0]} and "
                    f"{value} {kind}"
                )
        return results[0]


def switch_of(node: fx.Node) -> Switch | None:
    """Return what a node stands for; None where it is another one."""
    return node.target if isinstance(node.target, Switch) else None


def sources_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a switch stands for, one a candidate."""
    [sources] = node.args
    assert isinstance(sources, Sequence)
    return [source for source in sources if isinstance(source, fx.Node)]


def _kind(value: Tensor) -> str:
    return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


class Mixture(NamedTuple):
    """Several candidates of a decision, whose results are added up.

    Attributes:
        candidates: which.
        weights: (len(candidates),) of each.
        taken: the one whose parameters get a gradient, if that is one alone; the others are there for the gradient of
            the weights, and are left out where that is not asked for.
    """

    candidates: tuple[Value, ...]
    weights: Tensor
    taken: Value | None = None


Choices = Mapping[str, Value | Mixture]
"""By decision, the candidate that is computed, or several."""


@dataclass(frozen=True)
class _Slot:
    """The result of a node, in what another one is called with."""

    number: int


class _Step(NamedTuple):
    """A node of the graph, and the numbers of those that it reads.

    Args:
        kind: as `op` of a node.
        target: what is called, a switch among them.
        arguments: by position and by name, with slots for results of nodes.
        sources: numbers of these.
    """

    kind: str
    target: Any
    arguments: tuple[Any, Any]
    sources: tuple[int, ...]


_Plan = tuple[tuple[int, tuple[int, ...]], ...]
"""The numbers of the steps to a result, in their order, each with those that no later one reads."""


class SuperGraph:
    """All models of a space as one function.

    Args:
        graph: with switches.
    """

    def __init__(self, graph: fx.Graph) -> None:
        numbers = {node: number for number, node in enumerate(graph.nodes)}
        self._steps = []
        for node in numbers:
            arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: _Slot(numbers[source]))  # type: ignore[arg-type, return-value]
            sources = tuple(numbers[source] for source in nodes_in((node.args, dict(node.kwargs))))
            self._steps.append(_Step(node.op, node.target, arguments, sources))
        self._inputs = [number for number, step in enumerate(self._steps) if step.kind == "placeholder"]
        self._plans: dict[tuple[Any, ...], _Plan] = {}

    def __call__(self, root: nn.Module, inputs: Sequence[Any], choices: Choices) -> Any:
        """Return what the models of some choices make of inputs.

        Args:
            root: the space.
            inputs: in the order of the base's.
            choices: for each decision that is asked for, at least.
        """
        values: dict[int, Any] = dict(zip(self._inputs, inputs, strict=True))
        for number, last_read in self._plan(choices):
            if number not in values:
                values[number] = self._result(number, root, values, choices)
            for source in last_read:
                del values[source]
        return values[len(self._steps) - 1]

    def taken(self, choices: Choices) -> dict[str, tuple[Value, ...]]:
        """Return the decisions that matter to the result, each with the candidates that are computed for it."""
        targets = [self._steps[number].target for number, _ in self._plan(choices)]
        switches = dict.fromkeys(target.decision for target in targets if isinstance(target, Switch))
        return {decision: _candidates(choices[decision]) for decision in switches}

    @property
    def decisions(self) -> frozenset[str]:
        """The decisions by which models differ."""
        return frozenset(step.target.decision for step in self._steps if isinstance(step.target, Switch))

    def read(self, choices: Choices) -> list[tuple[str, str]]:
        """Return what is read of the space: `call_module` or `get_attr`, and the path of the module or attribute."""
        steps = [self._steps[number] for number, _ in self._plan(choices)]
        return [(step.kind, step.target) for step in steps if step.kind in ("call_module", "get_attr")]

    def _plan(self, choices: Choices) -> _Plan:
        key = tuple((name, _candidates(chosen)) for name, chosen in choices.items())
        if key not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            steps, read = [], {len(self._steps) - 1}
            # Nodes are numbered in the order in which they are computed.
            for number in range(len(self._steps) - 1, -1, -1):
                if number in read:
                    sources = self._sources(number, choices)
                    steps.append((number, tuple(dict.fromkeys(source for source in sources if source not in read))))
                    read.update(sources)
            self._plans[key] = tuple(reversed(steps))
        return self._plans[key]

    def _sources(self, number: int, choices: Choices) -> tuple[int, ...]:
        """Return the numbers of what a node reads; of what a switch stands for, or mixes."""
        switch, sources = self._steps[number].target, self._steps[number].sources
        if not isinstance(switch, Switch):
            return sources
        wanted = _candidates(choices.get(switch.decision))
        for value in wanted:
            if value not in switch.values:
                raise ConfigError(
                    f"path: found {shown(value)} for the decision '{switch.decision}'; expected one of "
                    f"{', '.join(map(str, switch.values))}. Correct what the space is called with."
                )
        return tuple(sources[switch.values.index(value)] for value in wanted)

    def _result(self, number: int, root: nn.Module, values: Mapping[int, Any], choices: Choices) -> Any:
        kind, target, arguments, _ = self._steps[number]
        if kind == "get_attr":
            return attrgetter(target)(root)
        if isinstance(target, Switch):
            return _mixed(choices[target.decision], [values[source] for source in self._sources(number, choices)])
        args, kwargs = fx.node.map_aggregate(
            arguments, lambda value: values[value.number] if isinstance(value, _Slot) else value
        )
        if kind == "call_module":
            return attrgetter(target)(root)(*args, **kwargs)
        if kind == "call_function":
            return target(*args, **kwargs)
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        assert kind == "output"
        return args[0]


def _mixed(chosen: Value | Mixture, results: list[Any]) -> Any:
    if not isinstance(chosen, Mixture):
        return results[0]
    if chosen.taken is None:
        stacked = torch.stack(results)
        # Autocast leaves tensordot alone.
        return torch.tensordot(chosen.weights.to(stacked.dtype), stacked, dims=1)
    parts = zip(chosen.candidates, chosen.weights, results, strict=True)
    return sum(weight * part if chosen.taken == name else gated(weight, part) for name, weight, part in parts)


def _candidates(chosen: Value | Mixture | None) -> tuple[Value, ...]:
    # None is no candidate, and is refused where it is looked up.
    return chosen.candidates if isinstance(chosen, Mixture) else (cast(Value, chosen),)


def gated(weight: Tensor, result: Tensor) -> Tensor:
    """Return `weight * result` behind a gate that is closed: a backward pass leaves out the result's gradient, 0.

    So the parameters of a candidate that is not taken have no gradient, and an optimizer leaves them. Where the
    gradient is itself differentiated it is there: its derivative for the weight is not zero, and second derivatives,
    tangents and finite differences are those of the mixture.

    Args:
        weight: 0-D; 0 where the gate is closed.
        result: any shape.

    Source: Cai et al. 2019, ProxylessNAS (arXiv 1812.00332), section 3.2.

    Example:
        >>> weight, result = torch.zeros((), requires_grad=True), torch.ones(2, requires_grad=True)
        >>> gated(weight, result).sum().backward()
        >>> weight.grad, result.grad
        (tensor(2.), None)
    """
    product: Tensor = _Gate.apply(weight, result)
    return product


class _Gate(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, result: Tensor) -> Tensor:
        return weight * result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor | None]:
        weight, result = ctx.saved_tensors
        return (cotangent * result).sum(), weight * cotangent if torch.is_grad_enabled() else None

    @staticmethod
    def jvp(ctx: Any, weight_tangent: Tensor | None, result_tangent: Tensor | None) -> Tensor:
        weight, result = ctx.saved_tensors
        terms = [
            weight_tangent * result if weight_tangent is not None else None,
            weight * result_tangent if result_tangent is not None else None,
        ]
        return sum(term for term in terms if term is not None)


def path_of_bad(result: Any, choices: Choices) -> str | None:
    """Return in words the path whose result is not finite; None where it is, or where looking would have to wait.

    On devices other than a CPU each look would wait for the mini-batch.
    """
    if not _is_readable(result) or torch.isfinite(result.detach().sum()):
        return None
    return ", ".join(f"{name}: {' + '.join(map(str, _candidates(chosen)))}" for name, chosen in choices.items())


def _is_readable(result: Any) -> bool:
    return (
        type(result) is Tensor
        and result.device.type == "cpu"
        and not is_tracing()
        and not torch.compiler.is_compiling()
        and not is_functorch_wrapped_tensor(result)
        and current_dispatch_mode() is None
    )
