"""A shared graph as a function, of which each call computes one path or a mixture of several."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown
from mlotool.spaces.decisions import Value
from mlotool.spaces.shared.gate import gated
from mlotool.spaces.shared.switch import sources_of, switch_of

MAX_PLANS = 4096


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


class _Slot(NamedTuple):
    """The result of a node, in what another one is called with."""

    number: int


class _Step(NamedTuple):
    """A node, called.

    Args:
        number: of the node.
        kind: `call_module`, `call_function`, `call_method`, `get_attr`; or `mix`.
        target: what is called; of a mixture the decision.
        args: with slots for results of nodes.
        kwargs: likewise.
        inputs: numbers of the results that it is called with, where it is called with nothing else; None elsewhere.
        last_read: numbers of results that no later step reads.
    """

    number: int
    kind: str
    target: Any
    args: Any
    kwargs: Any
    inputs: tuple[int, ...] | None
    last_read: tuple[int, ...]


class _Plan(NamedTuple):
    """What is called for some choices.

    Args:
        steps: in their order.
        taken: the decisions that were looked at, with the candidates that are computed for them.
    """

    steps: tuple[_Step, ...]
    taken: tuple[tuple[str, tuple[Value, ...]], ...]


class SuperGraph:
    """All models of a space as one function.

    Args:
        graph: with switches.
    """

    def __init__(self, graph: fx.Graph) -> None:
        nodes = list(graph.nodes)
        numbers = {node: number for number, node in enumerate(nodes)}
        self._inputs = [numbers[each] for each in nodes if each.op == "placeholder"]
        self._switches: dict[int, tuple[str, dict[Value, int]]] = {}
        self._nodes: dict[int, tuple[str, Any, Any, Any]] = {}
        for number, node in enumerate(nodes):
            found = switch_of(node)
            if found is not None:
                sources = [numbers[each] for each in sources_of(node)]
                self._switches[number] = found.decision, dict(zip(found.values, sources, strict=True))
            elif node.op != "placeholder":
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: _Slot(numbers[each]))
                self._nodes[number] = node.op, node.target, args, kwargs
        self._output = numbers[nodes[-1]]
        self._plans: dict[tuple[Any, ...], _Plan] = {}

    def __call__(self, root: nn.Module, inputs: Sequence[Any], choices: Choices) -> Any:
        """Return what the models of some choices make of inputs.

        Args:
            root: the space.
            inputs: in the order of the base's.
            choices: for each decision that is asked for, at least.
        """
        values: dict[int, Any] = dict(zip(self._inputs, inputs, strict=True))
        for step in self._plan(choices).steps:
            values[step.number] = _called(step, root, values, choices)
            for number in step.last_read:
                del values[number]
        return values[self._output]

    def results(
        self, root: nn.Module, inputs: Sequence[Any], choices: Choices
    ) -> Iterator[tuple[str, Any, nn.Module | None]]:
        """Yield of each step what it is, in words, what it returns, and its module. Arguments as for the call."""
        values: dict[int, Any] = dict(zip(self._inputs, inputs, strict=True))
        for step in self._plan(choices).steps:
            values[step.number] = _called(step, root, values, choices)
            module = attrgetter(step.target)(root) if step.kind == "call_module" else None
            yield self._in_words(step, choices), values[step.number], module

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
                read[number] = self._nodes[number][2:]
            elif number in self._switches:
                chosen = self._sources(number, choices)
                taken[self._switches[number][0]] = _candidates(choices[self._switches[number][0]])
                if isinstance(chosen, int):
                    stands_for[number] = chosen
                    wanted.add(chosen)
                    continue
                read[number] = tuple(map(_Slot, chosen)), {}
            wanted.update(_numbers(read.get(number, ())))
        for number in sorted(stands_for):
            stands_for[number] = stands_for.get(stands_for[number], stands_for[number])
        reads = {
            number: _mapped(each, lambda slot: _Slot(stands_for.get(slot.number, slot.number)))
            for number, each in read.items()
        }
        last = {each: number for number in sorted(reads) for each in _numbers(reads[number])}
        steps = []
        for number in sorted(reads):
            args, kwargs = reads[number]
            kind, target = ("mix", self._switches[number][0]) if number in self._switches else self._nodes[number][:2]
            is_plain = not kwargs and all(isinstance(each, _Slot) for each in args)
            inputs = tuple(each.number for each in args) if is_plain else None
            done = tuple(dict.fromkeys(each for each in _numbers(reads[number]) if last[each] == number))
            steps.append(_Step(number, kind, target, args, kwargs, inputs, done))
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

    def _sources(self, number: int, choices: Choices) -> int | list[int]:
        """Return the number of what a switch stands for, or those of what it mixes."""
        decision, sources = self._switches[number]
        chosen = choices.get(decision)
        wanted = _candidates(chosen)
        for each in wanted:
            if each not in sources:
                raise ConfigError(
                    f"path: found {shown(each)} for the decision '{decision}'; expected one of "
                    f"{', '.join(map(str, sources))}. Correct what the space is called with."
                )
        found = [sources[each] for each in wanted if each is not None]
        return found if isinstance(chosen, Mixture) else found[0]


def _called(step: _Step, root: nn.Module, values: Mapping[int, Any], choices: Choices) -> Any:
    if step.kind == "get_attr":
        return attrgetter(step.target)(root)
    if step.inputs is not None:
        args, kwargs = [values[each] for each in step.inputs], {}
    else:
        args, kwargs = _mapped((step.args, step.kwargs), lambda each: values[each.number])
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
    if isinstance(value, _Slot):
        return function(value)
    if isinstance(value, tuple):
        parts = [_mapped(each, function) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [_mapped(each, function) for each in value]
    if isinstance(value, dict):
        return {key: _mapped(each, function) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(each, function) for each in (value.start, value.stop, value.step)))
    return value


def _numbers(value: Any) -> list[int]:
    found: list[int] = []

    def take(slot: _Slot) -> _Slot:
        found.append(slot.number)
        return slot

    _mapped(value, take)
    return found
