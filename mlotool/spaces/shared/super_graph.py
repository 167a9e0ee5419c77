"""A shared graph as a function, of which each call computes one path or a mixture of several."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import Function
from torch.utils import _pytree as pytree

from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown
from mlotool.core.tracing import is_tracing
from mlotool.spaces.decisions import Value

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
        kinds = [str(pytree.tree_map_only(Tensor, _kind, each)) for each in results]
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
    return [each for each in sources if isinstance(each, fx.Node)]


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
    """A node, called.

    Args:
        number: of the node.
        kind: `call_module`, `call_function`, `call_method`, `get_attr`, `output`; or `mix`.
        target: what is called; of a mixture the decision.
        arguments: by position and by name, with slots for results of nodes.
        inputs: numbers of the results that it is called with, where it is called with nothing else; None elsewhere.
        last_read: numbers of results that no later step reads.
    """

    number: int
    kind: str
    target: Any
    arguments: tuple[Any, Any]
    inputs: tuple[int, ...] | None
    last_read: tuple[int, ...]


class _Plan(NamedTuple):
    """The steps that are called for some choices, and the decisions that were looked at, with what is computed."""

    steps: tuple[_Step, ...]
    taken: tuple[tuple[str, tuple[Value, ...]], ...]


class SuperGraph:
    """All models of a space as one function.

    Args:
        graph: with switches.
    """

    def __init__(self, graph: fx.Graph) -> None:
        numbers = {node: number for number, node in enumerate(graph.nodes)}
        self._inputs = [number for node, number in numbers.items() if node.op == "placeholder"]
        self._switches: dict[int, tuple[str, dict[Value, int]]] = {}
        self._nodes: dict[int, tuple[str, Any, tuple[Any, Any]]] = {}
        for node, number in numbers.items():
            switch = switch_of(node)
            if switch is not None:
                sources = [numbers[each] for each in sources_of(node)]
                self._switches[number] = switch.decision, dict(zip(switch.values, sources, strict=True))
            elif node.op != "placeholder":
                arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: _Slot(numbers[each]))  # type: ignore[arg-type, return-value]
                self._nodes[number] = node.op, node.target, arguments
        self._output = len(numbers) - 1
        self._plans: dict[tuple[Any, ...], _Plan] = {}

    def __call__(self, root: nn.Module, inputs: Sequence[Any], choices: Choices) -> Any:
        """Return what the models of some choices make of inputs.

        Args:
            root: the space.
            inputs: in the order of the base's.
            choices: for each decision that is asked for, at least.
        """
        [result] = deque((value for _, value in self._run(root, inputs, choices)), maxlen=1)
        return result

    def _run(self, root: nn.Module, inputs: Sequence[Any], choices: Choices) -> Iterator[tuple[_Step, Any]]:
        """Yield each step and what it returns."""
        values: dict[int, Any] = dict(zip(self._inputs, inputs, strict=True))
        for step in self._plan(choices).steps:
            values[step.number] = _called(step, root, values, choices)
            for number in step.last_read:
                del values[number]
            yield step, values[step.number]

    def first_bad(self, root: nn.Module, inputs: Sequence[Any], choices: Choices) -> str | None:
        """Return the first step whose result is not finite, in words; arguments as for the call."""
        for step, value in self._run(root, inputs, choices):
            if is_bad(value):
                module = attrgetter(step.target)(root) if step.kind == "call_module" else nn.Module()
                bad = [name for name, parameter in module.named_parameters() if is_bad(parameter)]
                before = f" Its parameter {bad[0]} held numbers that are not finite before." if bad else ""
                return f"the result of {self._in_words(step, choices)} was the first that is not finite.{before}"
        return None

    def taken(self, choices: Choices) -> tuple[tuple[str, tuple[Value, ...]], ...]:
        """Return the decisions that matter to the result, each with the candidates that are computed for it."""
        return self._plan(choices).taken

    @property
    def decisions(self) -> frozenset[str]:
        """The decisions by which models differ."""
        return frozenset(decision for decision, _ in self._switches.values())

    def read(self, choices: Choices) -> list[tuple[str, str]]:
        """Return what is read of the space: `call_module` or `get_attr`, and the path of the module or attribute."""
        kinds = ("call_module", "get_attr")
        return [(step.kind, step.target) for step in self._plan(choices).steps if step.kind in kinds]

    def _plan(self, choices: Choices) -> _Plan:
        key = tuple((name, each.candidates if isinstance(each, Mixture) else each) for name, each in choices.items())
        if key not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = self._planned(choices)
        return self._plans[key]

    def _planned(self, choices: Choices) -> _Plan:
        """Return the steps to the result, and no others."""
        read: dict[int, tuple[Any, Any]] = {}
        stands_for: dict[int, int] = {}
        wanted = {self._output}
        taken: dict[str, tuple[Value, ...]] = {}
        # Nodes are numbered in the order in which they are computed.
        for number in range(self._output, -1, -1):
            if number not in wanted:
                continue
            if number in self._nodes:
                read[number] = self._nodes[number][2]
            elif number in self._switches:
                decision = self._switches[number][0]
                sources = self._sources(number, choices)
                taken[decision] = _candidates(choices[decision])
                if not isinstance(choices[decision], Mixture):
                    [stands_for[number]] = sources
                    wanted.update(sources)
                    continue
                read[number] = tuple(map(_Slot, sources)), {}
            wanted.update(_numbers(read.get(number, ())))
        for number in sorted(stands_for):
            stands_for[number] = stands_for.get(stands_for[number], stands_for[number])
        reads = {
            number: _mapped(read[number], lambda slot: _Slot(stands_for.get(slot.number, slot.number)))
            for number in sorted(read)
        }
        last = {source: number for number, arguments in reads.items() for source in _numbers(arguments)}
        steps = []
        for number, arguments in reads.items():
            kind, target = ("mix", self._switches[number][0]) if number in self._switches else self._nodes[number][:2]
            is_plain = not arguments[1] and all(isinstance(each, _Slot) for each in arguments[0])
            sources = _numbers(arguments)
            done = tuple(dict.fromkeys(source for source in sources if last[source] == number))
            steps.append(_Step(number, kind, target, arguments, tuple(sources) if is_plain else None, done))
        return _Plan(tuple(steps), tuple(taken.items()))

    def _in_words(self, step: _Step, choices: Choices) -> str:
        """Return what a step is, with the candidates whose result it is."""
        if step.kind == "mix":
            return f"the mixture of '{step.target}'"
        if step.kind == "output":
            return "the model"
        candidates = {
            f"{value} of {decision}": None
            for decision, sources in self._switches.values()
            for value, number in sources.items()
            if number == step.number and value in _candidates(choices.get(decision))
        }
        name = f"'{getattr(step.target, '__name__', step.target)}'"
        return f"{name} ({', '.join(candidates)})" if candidates else name

    def _sources(self, number: int, choices: Choices) -> list[int]:
        """Return the numbers of what a switch stands for, or mixes."""
        decision, sources = self._switches[number]
        wanted = _candidates(choices.get(decision))
        for value in wanted:
            if value not in sources:
                raise ConfigError(
                    f"path: found {shown(value)} for the decision '{decision}'; expected one of "
                    f"{', '.join(map(str, sources))}. Correct what the space is called with."
                )
        return [sources[value] for value in wanted]


def _called(step: _Step, root: nn.Module, values: Mapping[int, Any], choices: Choices) -> Any:
    if step.kind == "get_attr":
        return attrgetter(step.target)(root)
    if step.inputs is not None:
        args, kwargs = [values[number] for number in step.inputs], {}
    else:
        args, kwargs = _mapped(step.arguments, lambda slot: values[slot.number])
    if step.kind == "call_module":
        return attrgetter(step.target)(root)(*args, **kwargs)
    if step.kind == "call_function":
        return step.target(*args, **kwargs)
    if step.kind == "call_method":
        return getattr(args[0], step.target)(*args[1:], **kwargs)
    if step.kind == "mix":
        chosen = choices[step.target]
        assert isinstance(chosen, Mixture)
        if chosen.taken is None:
            results = torch.stack(args)
            # Autocast leaves tensordot alone.
            return torch.tensordot(chosen.weights.to(results.dtype), results, dims=1)
        parts = zip(chosen.candidates, chosen.weights, args, strict=True)
        return sum(weight * each if chosen.taken == name else gated(weight, each) for name, weight, each in parts)
    # The output.
    return args[0]


def _candidates(chosen: Value | Mixture | None) -> tuple[Value, ...]:
    # None is no candidate, and is refused where it is looked up.
    return chosen.candidates if isinstance(chosen, Mixture) else (cast(Value, chosen),)


def _mapped(value: Any, function: Callable[[_Slot], Any]) -> Any:
    """Return arguments with others in the place of slots."""
    return fx.node.map_aggregate(value, lambda each: function(each) if isinstance(each, _Slot) else each)


def _numbers(value: Any) -> list[int]:
    numbers: list[int] = []
    _mapped(value, lambda slot: numbers.append(slot.number))
    return numbers


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


class Unsound:
    """Looks at the results of a space's calls in training, and keeps what is to be told of the first bad one.

    On a CPU a result is looked at after its call; where it is not finite, the same path is computed once more, step by
    step. On other devices that would wait for each mini-batch, and nothing is looked at.

    Attributes:
        found: in a whole sentence, which path it was and where on it a result was first not finite; None where all
            results were finite.
    """

    def __init__(self) -> None:
        self.found: str | None = None
        self._was_bad = False

    def look(self, result: Any, graph: SuperGraph, root: nn.Module, inputs: Sequence[Any], choices: Choices) -> None:
        """Look at the result of a call. Arguments as for `SuperGraph`."""
        if not _is_readable(result) or torch.isfinite(result.detach().sum()):
            self._was_bad = False
            return
        if not self._was_bad:
            self.found = _told(graph, root, inputs, choices) or self.found
        self._was_bad = self.found is not None


def _told(graph: SuperGraph, root: nn.Module, inputs: Sequence[Any], choices: Choices) -> str | None:
    path = ", ".join(f"{name}: {_in_words(each)}" for name, each in choices.items())
    if is_bad(list(inputs)):
        return f"The space was called with numbers that are not finite, on the path {path}."
    buffers = [(buffer, buffer.clone()) for buffer in root.buffers()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        told = graph.first_bad(root, inputs, choices)
        for buffer, value in buffers:
            # Not counted as a change: the backward pass of the call that was bad has kept the buffers.
            buffer.data.copy_(value)
    return told and f"On the path {path} {told}"


def _is_readable(result: Any) -> bool:
    return (
        type(result) is Tensor
        and result.device.type == "cpu"
        and not is_tracing()
        and not torch.compiler.is_compiling()
        and not is_functorch_wrapped_tensor(result)
        and torch.utils._python_dispatch._get_current_dispatch_mode() is None
    )


def is_bad(result: Any) -> bool:
    """Say whether tensors hold numbers that are not finite."""
    tensors = (each for each in pytree.tree_leaves(result) if isinstance(each, Tensor))
    return any(each.is_floating_point() and not bool(each.isfinite().all()) for each in tensors)


def _in_words(chosen: Value | Mixture) -> str:
    if not isinstance(chosen, Mixture):
        return str(chosen)
    weights = dict(zip(chosen.candidates, chosen.weights.tolist(), strict=True))
    return " + ".join(f"{weight:.2g} {name}" for name, weight in weights.items())
