"""A graph that holds all models of a space, the paths through it, and the function that computes one or several.

Where models differ, a switch reads what each of them has there.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.core.private import current_dispatch_mode, is_batchedtensor, is_functorch_wrapped_tensor, pytree
from mlotool.core.settings import target
from mlotool.core.tracing import is_tracing
from mlotool.spaces import tracing
from mlotool.spaces.building import Build, NewModules, accepted, dtype_at
from mlotool.spaces.decisions import Value, check_number, deciding
from mlotool.spaces.model_graph import ModelGraph, V
from mlotool.spaces.places import Place, Places, Target
from mlotool.spaces.shapes import Shapes
from mlotool.spaces.tracing import BLOCKS, ID, OWNER, node_id, nodes_in

# Decisions that have to be made so: all of them.
Condition = tuple[tuple[str, Value], ...]

# One model of a space: a candidate for each decision that it asks for, by name.
Path = Mapping[str, Value]


@dataclass(frozen=True)
class SharedDecision:
    """A decision of a shared space.

    Args:
        name: its own.
        candidates: in their order.
        conditions: it is asked for where one of them holds.

    Example:
        >>> depth = SharedDecision("kernel_1", ("k3", "k5"), ((("depth", 2),), (("depth", 3),)))
        >>> depth.is_asked({"depth": 1}), depth.is_asked({"depth": 3})
        (False, True)
    """

    name: str
    candidates: tuple[Value, ...]
    conditions: tuple[Condition, ...] = ((),)

    def is_asked(self, path: Path) -> bool:
        """Say whether a model with these earlier decisions asks for it."""
        return any(all(path.get(name) == value for name, value in condition) for condition in self.conditions)


class PathTable:
    """Takes note of decisions while a shared space is made."""

    def __init__(self) -> None:
        self._candidates: dict[str, tuple[Value, ...]] = {}
        self._conditions: dict[str, set[Condition]] = {}
        self._owners: dict[str, str] = {}

    def note(self, mutator: str, name: str, candidates: tuple[Value, ...], condition: Condition) -> None:
        """Take note that a decision is asked for.

        Raises:
            ConfigError: another mutator has a decision of this name, it has other candidates, or there are too many.
        """
        if self._owners.setdefault(name, mutator) != mutator or self._candidates.get(name, candidates) != candidates:
            raise ConfigError(f"decisions.{name}: found two decisions of this name. Give a mutator another name.")
        if name not in self._candidates:
            check_number(name, len(self._candidates))
        self._candidates[name] = candidates
        self._conditions.setdefault(name, set()).add(condition)

    @property
    def decisions(self) -> tuple[SharedDecision, ...]:
        """All of them, in the order in which they were first asked for."""
        return tuple(
            SharedDecision(name, candidates, tuple(sorted(self._conditions[name], key=str)))
            for name, candidates in self._candidates.items()
        )


def path_of(decisions: Sequence[SharedDecision], decide: Callable[[SharedDecision], Value]) -> dict[str, Value]:
    """Return a path, of which each decision is made by a function, in their order.

    Example:
        >>> path_of((SharedDecision("kernel", ("k3", "k5")),), lambda each: each.candidates[-1])
        {'kernel': 'k5'}
    """
    path: dict[str, Value] = {}
    for decision in decisions:
        if decision.is_asked(path):
            path[decision.name] = decide(decision)
    return path


class AbstractPaths(nn.Module):
    """Draws paths.

    State that is kept from one draw to the next is a buffer, so that a resumed run draws the same paths. Random numbers
    come from torch's default generator.

    Example:
        >>> class First(AbstractPaths):
        ...     def forward(self, decisions):
        ...         return path_of(decisions, lambda each: each.candidates[0])
        >>> First()([SharedDecision("kernel", ("k3", "k5"))])
        {'kernel': 'k3'}
    """

    def begin(self, decisions: Sequence[SharedDecision]) -> None:
        """Make the buffers for a space with these decisions, if it has any."""

    @abstractmethod
    def forward(self, decisions: Sequence[SharedDecision]) -> Path:
        """Return a path.

        Args:
            decisions: of the space, in the order in which they are asked for.
        """


def number_drawn(drawn: Tensor) -> int:
    """Return a number that was drawn.

    Args:
        drawn: one element.

    Raises:
        ConfigError: there is one for each task.

    Example:
        >>> number_drawn(torch.tensor([2]))
        2
    """
    if is_batchedtensor(drawn):
        fault = "tasks: found a path that is drawn in a loss of several tasks, which are evaluated at once"
        raise ConfigError(f"{fault}. Set tasks to null, or write mlotool.spaces.PathWeights.")
    return int(drawn)


@target("module")
class UniformPaths(AbstractPaths):
    """Draws a candidate for each decision, all with the same probability (single path one-shot).

    Source: Guo et al. 2020, Single Path One-Shot Neural Architecture Search (arXiv 1904.00420), section 3.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> UniformPaths()([SharedDecision("kernel", ("k3", "k5"))])
        {'kernel': 'k3'}
    """

    def forward(self, decisions: Sequence[SharedDecision]) -> Path:
        """Return a path."""
        return path_of(
            decisions, lambda decision: decision.candidates[number_drawn(torch.randint(len(decision.candidates), ()))]
        )


@target("module")
class FairPaths(AbstractPaths):
    """Draws the candidates of each decision in turn, in a random order that changes after each round (FairNAS).

    In k paths that ask for a decision with k candidates, each candidate is taken once, so that all are trained equally
    often.

    Source: Chu et al. 2021, FairNAS (arXiv 1907.01845), section 3.2.

    Example:
        >>> paths, decisions = FairPaths(), [SharedDecision("kernel", ("k3", "k5"))]
        >>> paths.begin(decisions)
        >>> sorted(paths(decisions)["kernel"] for _ in range(4))
        ['k3', 'k3', 'k5', 'k5']

    Attributes:
        left: (decisions, most candidates) bool, the candidates that are still to be taken in this round.
    """

    left: Tensor

    def begin(self, decisions: Sequence[SharedDecision]) -> None:
        """Let all candidates be left."""
        most = max((len(decision.candidates) for decision in decisions), default=0)
        self.register_buffer("left", torch.zeros(len(decisions), most, dtype=torch.bool))

    def forward(self, decisions: Sequence[SharedDecision]) -> Path:
        """Return a path; in evaluation, what is left stays."""
        rows = dict(zip([decision.name for decision in decisions], self.left.unbind(), strict=True))
        return path_of(
            decisions, lambda decision: decision.candidates[self._drawn(rows[decision.name], len(decision.candidates))]
        )

    def _drawn(self, left: Tensor, count: int) -> int:
        open_ones = left[:count].nonzero().flatten().tolist() or list(range(count))
        drawn: int = open_ones[number_drawn(torch.randint(len(open_ones), ()))]
        if self.training:
            left[:count] = False
            left[[place for place in open_ones if place != drawn]] = True
        return drawn


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
                shapes = f"{self.values[0]} {kinds[0]} and {value} {kind}"
                raise ValueError(f"the candidates of '{self.decision}' return different shapes, {shapes}")
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
    """A weighted sum of several candidates of a decision.

    Attributes:
        candidates: the candidates.
        weights: (len(candidates),), the weight of each.
        taken: the only candidate whose parameters get a gradient; None: all. The others are computed only for the
            gradient of the weights, and are left out if that is not needed.
    """

    candidates: tuple[Value, ...]
    weights: Tensor
    taken: Value | None = None


# By decision, the candidate that is computed, or several.
Choices = Mapping[str, Value | Mixture]


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


# The numbers of the steps to a result, in their order, each with those that no later one reads.
_Plan = tuple[tuple[int, tuple[int, ...]], ...]


class SuperGraph:
    """All models of a space as one function; without switches, its only one.

    Pickled it has functions by their names. A lambda or a function within another has no name.

    Args:
        graph: with a switch where models differ.
    """

    def __init__(self, graph: fx.Graph) -> None:
        numbers = {node: number for number, node in enumerate(graph.nodes)}
        self._steps = []
        for node in numbers:
            arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: _Slot(numbers[source]))  # type: ignore[arg-type, return-value]
            sources = tuple(numbers[source] for source in nodes_in((node.args, dict(node.kwargs))))
            self._steps.append(_Step(node.op, node.target, arguments, sources))
        self._inputs = [number for number, step in enumerate(self._steps) if step.kind == "placeholder"]
        # What nobody reads may change a tensor or a buffer.
        self._ends = {number for node, number in numbers.items() if not node.users}
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
            steps, read = [], set(self._ends)
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
            expected = f"one of {', '.join(map(str, switch.values))}"
            require(value in switch.values, f"path.{switch.decision}", value, expected)
        return tuple(sources[switch.values.index(value)] for value in wanted)

    def _result(self, number: int, root: nn.Module, values: Mapping[int, Any], choices: Choices) -> Any:
        kind, target, arguments, _ = self._steps[number]
        if isinstance(target, Switch):
            return _mixed(choices[target.decision], [values[source] for source in self._sources(number, choices)])
        args, kwargs = fx.node.map_aggregate(
            arguments, lambda value: values[value.number] if isinstance(value, _Slot) else value
        )
        return tracing.carried_out(kind, target, root, args, kwargs)


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


class SharedPlaces(Places):
    """Finds what targets describe, in a graph that holds all models of a space.

    What stands for one of several modules of one id is a place of this id, if all of them are as described.
    """

    def every(self) -> Iterator[Place]:
        """Yield each node as a place, then each module of the base whose forward is several nodes."""
        return (place for place in super().every() if MARK not in place.id)

    def _fitting(self, target: Target, of_some: bool) -> Iterator[Place]:
        computed = always_computed(self._graph)
        choices = {node_id(node): node for node in self._graph.nodes if switch_of(node) is not None}
        chosen: dict[str, list[fx.Node]] = {}
        for place in super()._fitting(target, of_some):
            last = place.nodes[-1]
            if switch_of(last) is not None and len(place.nodes) == 1:
                continue
            if len(place.nodes) == 1 and place.id in choices:
                chosen.setdefault(place.id, []).append(last)
            elif of_some or last in computed:
                yield place
            else:
                raise _refusal(place.id)
        for name, nodes in chosen.items():
            members = [node for node in self._graph.nodes if node_id(node) == name and node is not choices[name]]
            if set(members) != set(nodes) or not (of_some or choices[name] in computed):
                raise _refusal(name)
            yield Place.of(name, (*members, choices[name]), None)


def always_computed(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that every model of a shared graph computes, whatever was decided."""
    needed: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if switch_of(node) is not None and node.args:
            below = frozenset.intersection(*(needed[source] for source in sources_of(node)))
        else:
            below = frozenset[fx.Node]().union(*(needed[source] for source in node.all_input_nodes))
        needed[node] = below | {node}
    return set(needed[next(iter(reversed(graph.nodes)))])


def _refusal(name: str) -> ConfigError:
    fault = f"at: found '{name}', which exists, or fits the description, only in some models of the shared space"
    return ConfigError(f"{fault}. Name places by their paths, or put this mutator before the one that decides on it.")


# Stands between the path of what is replaced and the candidate, in the path of a new module.
MARK = "@"


class SharedModules(NewModules):
    """Makes modules beside each other that a space would put in one another's place.

    Equal ones are one: those of the same candidate with the same settings at the same path.

    Args:
        root: the model.
        seed: of their random numbers.
        anew: makes the model anew, for its own modules once more; None where nobody can.

    Attributes:
        condition: decisions by which a module that is made now is read.
    """

    def __init__(self, root: nn.Module, seed: int, anew: Callable[[], nn.Module] | None) -> None:
        super().__init__(root, seed, anew)
        self.condition: Condition = ()
        self._places: dict[tuple[Any, ...], str] = {}

    def put(self, path: str, build: Build, settings: dict[str, Any], dtype: torch.dtype | None = None) -> str:
        """Make a module, with the random numbers that a space's has, and keep it at the path or beside it."""
        key = (path, id(build), repr(sorted(accepted(build, settings).items())), dtype)
        if key not in self._places:
            self._places[key] = super().put(path, build, settings, dtype)
        return self._places[key]

    def _path_for(self, path: str) -> str:
        values = [str(value) for _, value in self.condition]
        names = [path, *(f"{path}{MARK}{','.join(values[-last:])}" for last in range(1, len(values) + 1))]
        return next(name for name in chain(names, (f"{names[-1]},{i}" for i in count(2))) if not self.has(name))


# What `node.meta` of a new node holds: the decisions with which it was made.
CONDITION = "condition"

# By node, what it is called with.
Edges = dict[fx.Node, tuple[Any, Any]]


class SharedGraph(ModelGraph):
    """A traced model, to which mutators do all that they may do, side by side.

    For each candidate of a decision a mutator changes the graph as it was before. Then every node reads what it has
    read in all of the changed graphs; where they differ it reads a switch between them. That is how a compiler brings
    the branches of a program together (static single assignment).

    Args: as for `ModelGraph`.

    Attributes:
        table: the decisions.

    Source: Zhang et al. 2020, Retiarii, section 5 (super-graphs); Cytron et al. 1991, Efficiently Computing Static
    Single Assignment Form.
    """

    is_shared = True
    modules: SharedModules
    _modules_kind = SharedModules
    _places_kind = SharedPlaces

    def __init__(
        self, root: nn.Module, graph: fx.Graph, shapes: Shapes, seed: int, anew: Callable[[], nn.Module] | None
    ) -> None:
        super().__init__(root, graph, shapes, seed, anew)
        self.table = PathTable()
        self._switches: dict[tuple[str, tuple[fx.Node, ...]], fx.Node] = {}

    def alternatives(self, name: str, candidates: Iterable[V]) -> Iterator[V]:
        """Yield each candidate, and bring together what the body of the loop makes of the graph for each."""
        values, outside = tuple(candidates), self.modules.condition
        self.table.note(self._mutator, name, values, outside)
        before = _edges(self.graph.nodes)
        changes: list[Edges] = []
        parked: Edges = {}
        for value in values:
            self.modules.condition = (*outside, (name, value))
            yield value
            # Nodes read what they have read before, and new ones nothing: the next candidate is not to change them.
            now = _edges(self.graph.nodes)
            changes.append({node: now[node] for node in before if now[node] != before[node]})
            self._read({node: before[node] for node in changes[-1]})
            new = {node: edges for node, edges in now.items() if node not in before and node not in parked}
            parked |= new
            for node in new:
                node.args, node.kwargs = (), {}
        self.modules.condition = outside
        self._read(parked)
        self._bring_together(name, values, before, changes)

    def select(self, name: str, candidates: Iterable[V], make: Callable[[V], fx.Node]) -> fx.Node:
        """Return a switch between the nodes that are made for the candidates."""
        values = tuple(candidates)
        return self._switch(name, values, tuple(make(value) for value in self.alternatives(name, values)))

    @contextmanager
    def by(self, mutator: str) -> Iterator[None]:
        """Let a mutator work on the graph; what does not fit is a mistake here, and no model that is left out.

        Raises:
            ConfigError: a candidate does not fit, or the mutator decides in another way than by `alternatives`.
        """
        try:
            with super().by(mutator), deciding(_refuse):
                yield
        except InfeasibleModelError as error:
            made = ", ".join(f"{name}: {value}" for name, value in self.modules.condition)
            advice = f"Remove candidates that do not fit{f' ({made})' if made else ''}, or search without shared."
            raise ConfigError(f"{error} In a shared space each candidate has to fit. {advice}") from error

    def _replace_module(self, place: Place, node: fx.Node, build: Build, settings: dict[str, Any]) -> fx.Node:
        path = self.modules.put(str(node.target), build, settings, dtype_at([*place.inputs, node]))
        readers = list(node.users)
        with self.graph.inserting_after(node):
            new = self.graph.create_node("call_module", path, node.args, node.kwargs)
        new.meta |= {key: node.meta[key] for key in (ID, OWNER, tracing.CALLS, BLOCKS) if key in node.meta}
        self._note("replace", place.id, is_rewired=True)
        self._infer_new(new)
        self._let_read(readers, node, new)
        return new

    def replace(self, place: Place, build: Build, name: str) -> fx.Node:
        """Put a new module beside nodes, which is read in their stead.

        Raises:
            ConfigError: another mutator has several modules there.
        """
        if any(isinstance(node.target, Switch) and node_id(node) == place.id for node in place.nodes):
            fault = f"at: found '{place.id}', for which another mutator of the shared space decides already"
            raise ConfigError(f"{fault}. Write all candidates in one mutator, or search without shared.")
        return super().replace(place, build, name)

    def _created(self, node: fx.Node, name: str) -> fx.Node:
        node.meta[CONDITION] = self.modules.condition
        return super()._created(node, name)

    def _erase(self, place: Place) -> None:
        """Leave nodes, which other models have."""

    def _is_used(self, name: str) -> bool:
        """Say whether a node or module has a name; nodes that no model has together may have one name."""
        conditions = [node.meta.get(CONDITION, ()) for node in self.graph.nodes if node_id(node) == name]
        if not conditions:
            return self.modules.has(name)
        now = dict(self.modules.condition)
        return not all(any(now.get(key, value) != value for key, value in condition) for condition in conditions)

    def _read(self, edges: Edges) -> None:
        for node, (args, kwargs) in edges.items():
            node.args, node.kwargs = args, kwargs
        self._reads_other(edges)

    def _bring_together(self, name: str, values: tuple[Value, ...], before: Edges, changes: list[Edges]) -> None:
        for node in sorted(set().union(*changes)):
            every = [edges.get(node, before[node]) for edges in changes]
            forms = [fx.node.map_arg(edges, lambda _: "node") for edges in every]
            if any(form != forms[0] for form in forms):
                fault = f"the number of inputs of '{node_id(node)}' depends on the candidate of '{name}'"
                raise ConfigError(f"{fault}. Join its inputs before, or search without shared.")
            read = list(zip(*map(nodes_in, every), strict=True))
            switches = iter([self._switch(name, values, sources) for sources in read])
            self._read({node: fx.node.map_arg(every[0], lambda _, switches=switches: next(switches))})  # type: ignore[misc]

    def _switch(self, name: str, values: tuple[Value, ...], sources: tuple[fx.Node, ...]) -> fx.Node:
        """Return what stands for one of some nodes; the node itself, where they are one."""
        if len(set(sources)) == 1:
            return sources[0]
        if (name, sources) not in self._switches:
            with self.graph.inserting_after(tracing.last_of(self.graph, sources)):
                node = self.graph.call_function(Switch(name, values), (list(sources),))
            ids = {node_id(source) for source in sources}
            own = ids.pop() if len(ids) == 1 else f"{name}:choice"
            blocks = Place.of(own, sources, None).blocks
            node.meta |= {ID: own, OWNER: "", BLOCKS: blocks, CONDITION: self.modules.condition}
            self._note("create", own, is_rewired=True)
            self._infer_new(node)
            self._switches[name, sources] = node
        return self._switches[name, sources]


def _edges(nodes: Iterable[fx.Node]) -> Edges:
    return {node: (node.args, node.kwargs) for node in nodes}


def _refuse(name: str, candidates: tuple[Value, ...]) -> Value:
    fault = f"decisions.{name}: found `choose` of {len(candidates)} candidates, while a shared space needs all of them"
    raise ConfigError(f"{fault}. Write `for value in graph.alternatives(name, candidates):` in the mutator.")
