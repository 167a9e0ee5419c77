"""What people are told of a space: its nodes, without tensors and torch.fx, and how many models it has."""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from torch import fx, nn

from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces.decisions import Decide, Decision, Decisions, Value
from mlotool.spaces.model_graph import Change
from mlotool.spaces.shapes import shape_of
from mlotool.spaces.shared.shared_graph import sources_of, switch_of
from mlotool.spaces.tracing import kind_of, node_id


@dataclass(frozen=True)
class NodeSummary:
    """A node of a model's graph.

    Args:
        id: its id.
        kind: class of its module, or name of its function.
        inputs: ids of the nodes that it reads.
        shape: of its result, without the batch; None where that is no tensor, or not known.
        mutator: name of the last mutator that has made or changed it; None: it is the base's.
        stands_for: of a shared space, the decisions and their candidates whose result it is.
    """

    id: str
    kind: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...] | None
    mutator: str | None
    stands_for: tuple[tuple[str, str], ...] = ()


def summaries(graph: fx.Graph, root: nn.Module, changes: Sequence[Change]) -> tuple[NodeSummary, ...]:
    """Return the nodes of a graph, in the order in which they are computed.

    Candidates of a shared space that have one id are told apart as their parameters are: `conv`, `conv@k5`.
    """
    changed = {change.node: change.mutator for change in changes}
    candidates = _candidates(graph)
    ids = _different_ids(graph, candidates)
    nodes = []
    for node in graph.nodes:
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        shape, name = shape_of(node), node_id(node)
        mutator = changed.get(name, changed.get(name.partition(".")[0]))
        inputs, size = tuple(ids[source] for source in node.all_input_nodes), None if shape is None else tuple(shape)
        stands_for = tuple(candidates.get(node, ()))
        nodes.append(NodeSummary(ids[node], kind_of(node, module), inputs, size, mutator, stands_for))
    return tuple(nodes)


def nodes_of_spaces(module: nn.Module) -> tuple[NodeSummary, ...]:
    """Return the nodes of a module that is a space, or of the spaces in it, whose ids then begin with their paths.

    Example:
        >>> nodes_of_spaces(nn.Linear(2, 2))
        ()
    """
    own = vars(module).get("nodes")
    if isinstance(own, tuple) and all(isinstance(node, NodeSummary) for node in own):
        return own
    return tuple(
        replace(node, id=f"{name}.{node.id}", inputs=tuple(f"{name}.{source}" for source in node.inputs))
        for name, child in module.named_children()
        for node in nodes_of_spaces(child)
    )


def _candidates(graph: fx.Graph) -> dict[fx.Node, list[tuple[str, str]]]:
    """Return, by node, the decisions and candidates that it stands for."""
    candidates: dict[fx.Node, list[tuple[str, str]]] = {}
    for node in graph.nodes:
        switch = switch_of(node)
        if switch is not None:
            for value, source in zip(switch.values, sources_of(node), strict=True):
                candidates.setdefault(source, []).append((switch.decision, str(value)))
    return candidates


def _different_ids(graph: fx.Graph, candidates: Mapping[fx.Node, Sequence[tuple[str, str]]]) -> dict[fx.Node, str]:
    ids: dict[fx.Node, str] = {}
    used: set[str] = set()
    for node in graph.nodes:
        name, switch = node_id(node), switch_of(node)
        if name in used and switch is not None:
            name = f"{name}:{switch.__name__}"
        elif name in used and node in candidates:
            name = f"{name}@{candidates[node][0][1]}"
        names = chain([name], (f"{name}#{number}" for number in count(2)))
        ids[node] = next(name for name in names if name not in used)
        used.add(ids[node])
    return ids


# The candidates of the decisions that a build has asked for, by name.
Made = Mapping[str, tuple[Value, ...]]

# Random models that are built to see whether decisions change each other.
NUM_RANDOM = 4

# Of so many models each is built, and those that fit are counted.
FEW = 50


@dataclass(frozen=True)
class SpaceSize:
    """How many models a space has.

    Args:
        number: of models.
        bound: "" where it is the number; "at least" or "at most" where it is a bound.
        reason: how it was found.
    """

    number: int
    bound: str
    reason: str

    def __str__(self) -> str:
        """Return it in words."""
        bound = f"{self.bound} " if self.bound else ""
        return f"{bound}{_readable(self.number)} model{'' if self.number == 1 else 's'}: {self.reason}"


class _SpentError(Exception):
    """No more builds are to be made."""


def space_size(
    build: Callable[[Decide], Decisions], taken: Mapping[str, Decision], most: int = 200, seconds: float = 20.0
) -> SpaceSize:
    """Count the models of a space.

    Where there are few, each is built. Else the numbers of candidates are multiplied, if no decision changes which
    others there are; models in which all decisions are other ones, and then models that differ in one, are built to see
    that. Where some do, what they decide is walked through, and the rest multiplied.

    Args:
        build: builds the model of a function that decides, and returns what was asked for; an InfeasibleModelError is
            for decisions that make none. Tensors without values do (FakeTensorMode).
        taken: the decisions of a model that can be built.
        most: how many builds there may be.
        seconds: how long they may take.

    Returns:
        the number, and whether it is a bound.

    Example:
        >>> from mlotool.spaces.decisions import by_mapping
        >>> def build(decide):
        ...     with deciding(decide) as decisions:
        ...         [choose(f"kernel_{i}", [1, 3, 5]) for i in range(choose("depth", [1, 2, 3]))]
        ...     return decisions
        >>> space_size(build, build(by_mapping({})).made).number
        39
    """
    first, start = _offered(taken), {name: decision.value for name, decision in taken.items()}
    if not first:
        return SpaceSize(1, "", "nothing is decided")
    if _product(first) <= FEW:
        few = _Walk(build, start, 2 * FEW, seconds / 2, is_whole=True)
        try:
            number = sum(few.counts({}, first))
        except _SpentError:
            pass
        else:
            left = f"; {few.num_infeasible} other choices make no model" if few.num_infeasible else ""
            return SpaceSize(number, "", f"each was built once, without values{left}")
    return _Walk(build, start, most, seconds).size(first)


@dataclass
class _Walk:
    """Goes through what decides which decisions there are, and multiplies the rest.

    Args:
        build: builds the model of a function that decides.
        start: values of decisions, where nothing else is said.
        most: how many builds there may be.
        seconds: how long all of them may take.
        is_whole: whether it goes through all decisions, so that each model is built.
    """

    build: Callable[[Decide], Decisions]
    start: Mapping[str, Value]
    most: int
    seconds: float
    is_whole: bool = False

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds
        self.num_builds = self.num_infeasible = 0
        self._models: set[frozenset[tuple[str, Value]]] = set()
        self._seen: set[str] = set()
        self._deciding: dict[str, None] = {}

    def _ask(self, values: Mapping[str, Value]) -> Made | None:
        """Return the decisions of the model of some values; None where it is none."""
        if self.num_builds >= self.most or time.monotonic() > self._end:
            raise _SpentError
        self.num_builds += 1
        every = {**self.start, **values}
        try:
            made = self.build(lambda name, candidates: _taken(every, name, candidates)).made
        except InfeasibleModelError:
            self.num_infeasible += 1
            return None
        self._models.add(frozenset((name, decision.value) for name, decision in made.items()))
        return _offered(made)

    def size(self, first: Made) -> SpaceSize:
        """Return the number of models, or a bound of it."""
        number = 0
        try:
            # Each is a part of the space that no other has models of.
            for count in self.counts({}, first):
                number += count
        except _SpentError:
            known = {name: first[name] for name in first if name in self._seen - self._deciding.keys()}
            # Where some make no model, those that were built are all that is certain.
            built = len(self._models)
            number = built if self.num_infeasible else max(number, _product(known), built)
            return SpaceSize(
                number, "at least", f"the count ended after {self.num_builds} builds of models without values"
            )
        if self.num_infeasible:
            how = f"so many choices; {self.num_infeasible} of {self.num_builds} that were built make no model"
            return SpaceSize(number, "at most", how)
        if not self._deciding:
            return SpaceSize(number, "", f"{len(first)} decisions, none of which changes the others")
        few = ", ".join([*self._deciding][:3]) + (", .." if len(self._deciding) > 3 else "")
        return SpaceSize(number, "", f"counted by all values of {few}, which change what else is decided")

    def counts(self, fixed: Mapping[str, Value], made: Made | None) -> Iterator[int]:
        """Yield numbers of models, whose sum is that of the models with some values."""
        if made is None:
            return
        free = {name: candidates for name, candidates in made.items() if name not in fixed}
        name = next((name for name in free if self.is_whole or name in self._deciding), None)
        if name is None:
            probes = [self._ask({**fixed, **values}) for values in _probes(free, self.start)]
            if any(probe != made for probe in probes):
                name = self._deciding_one(fixed, made, free)
            if name is None and any(probe not in (None, made) for probe in probes):
                raise _SpentError
        if name is None:
            yield _product(free)
            return
        for value in free[name]:
            is_known = value == _taken(self.start, name, free[name])
            values = {**fixed, name: value}
            yield from self.counts(values, made if is_known else self._ask(values))

    def _deciding_one(self, fixed: Mapping[str, Value], made: Made, free: Made) -> str | None:
        """Return a decision that alone changes which others there are; behind fixed values it may be one more."""
        for names in (free.keys() - self._seen, free):
            for name in sorted(names, key=list(free).index):
                self._seen.add(name)
                others = (value for value in free[name] if value != _taken(self.start, name, free[name]))
                if any(self._ask({**fixed, name: value}) not in (None, made) for value in others):
                    self._deciding[name] = None
                    return name
        return None


def _taken(values: Mapping[str, Value], name: str, candidates: tuple[Value, ...]) -> Value:
    """Decide by values, or by the first candidate where they have none of them."""
    return values[name] if values.get(name) in candidates else candidates[0]


def _probes(made: Made, start: Mapping[str, Value]) -> Iterator[dict[str, Value]]:
    """Yield models far from the start: in each all decisions are others, then random ones."""
    several = {name: candidates for name, candidates in made.items() if len(candidates) > 1}
    others = {
        name: [value for value in every if value != _taken(start, name, every)] for name, every in several.items()
    }
    for step in range(max(map(len, others.values()), default=0)):
        yield {name: values[step % len(values)] for name, values in others.items()}
    generator = random.Random(0)
    for _ in range(NUM_RANDOM if len(several) > 1 else 0):
        yield {name: generator.choice(candidates) for name, candidates in several.items()}


def _offered(made: Mapping[str, Decision]) -> dict[str, tuple[Value, ...]]:
    return {name: decision.candidates for name, decision in made.items()}


def _product(made: Made) -> int:
    return math.prod(len(candidates) for candidates in made.values())


def _readable(number: int) -> str:
    # Whole numbers of any size, which floats are not.
    digits = str(number)
    return f"{number:,}" if number < 10**15 else f"about {digits[0]}.{digits[1]}e{len(digits) - 1}"
