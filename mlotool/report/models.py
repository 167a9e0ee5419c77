"""What the model spaces of a run became, from nodes.json and paths.json of its folder, which may be a stranger's."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mlotool.core.errors import RunFileError
from mlotool.core.escape import escape
from mlotool.core.run_files import read_json
from mlotool.report.formats import shortened
from mlotool.report.run_folder import as_dict

MAX_PROBLEMS = 20
MAX_NODES = MAX_DECISIONS = 2_000
MAX_INPUTS = MAX_CANDIDATES = 50
MAX_NAME = 120
MAX_COUNT = 10**15
MAX_LINKS = 2_000
"""Wires of a part of a graph, counted at each row that they pass; a part with more is one box."""

TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class ModelNode:
    """A node of a model's graph.

    Args:
        id: its id.
        kind: class of its module, or name of its function.
        inputs: ids of nodes before it.
        shape: of its result, in words; empty where it is not known.
        mutator: that has made or changed it; empty: it is the base's.
        stands_for: of a shared space, the decisions and their candidates whose result it is.
    """

    id: str
    kind: str
    inputs: tuple[str, ...]
    shape: str
    mutator: str
    stands_for: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Decided:
    """A decision: its name, the candidate that was taken, the first candidates, and how many there are."""

    name: str
    value: str
    candidates: tuple[str, ...]
    num_candidates: int


@dataclass(frozen=True)
class ModelRecord:
    """The model of one problem.

    Args:
        problem: its name.
        nodes: in the order in which they are computed; empty where they were not written.
        decisions: in the order in which they were made.
        num_parameters: None where it is not known.
    """

    problem: str
    nodes: tuple[ModelNode, ...]
    decisions: tuple[Decided, ...]
    num_parameters: int | None

    @property
    def is_shared(self) -> bool:
        """Whether it has several candidates of a decision at once, so that none is taken."""
        return any(each.stands_for for each in self.nodes)


@dataclass(frozen=True)
class TrainedCandidate:
    """A candidate of a decision of a shared space.

    Args:
        name: its own.
        count: training steps that have computed it.
        probability: of an architecture; None where there is none.
        is_found: whether the search has found it.
    """

    name: str
    count: int
    probability: float | None
    is_found: bool


SpacePaths = dict[str, list[TrainedCandidate]]
"""Candidates by decision, in the order of the graph."""

Shares = dict[tuple[str, str], tuple[float, bool]]
"""By decision and candidate, its share of the training steps, and whether the search has found it."""


def read_models(run_dir: Path) -> tuple[list[ModelRecord], list[str]]:
    """Return the models that a run folder tells of, and notes on what could not be read."""
    content, notes = _content(run_dir, "nodes.json")
    problems = list(as_dict(content.get("problems")).items())[:MAX_PROBLEMS]
    found = [_record(name, as_dict(each)) for name, each in problems]
    return [each for each in found if each.nodes or each.decisions], notes


def read_paths(run_dir: Path) -> tuple[dict[str, SpacePaths], list[str]]:
    """Return the shared spaces of a run folder by problem, and notes on what could not be read."""
    content, notes = _content(run_dir, "paths.json")
    architectures = list(as_dict(content.get("architectures")).values())[:MAX_PROBLEMS]
    found = {name: each for one in architectures for name, each in _decisions(one).items()}
    spaces = list(as_dict(content.get("spaces")).items())[:MAX_PROBLEMS]
    read = {_text(name): _space(_decisions(each), found) for name, each in spaces}
    return {name: each for name, each in read.items() if each}, notes


def shares(space: SpacePaths) -> Shares:
    """Return the shares of the candidates of a space; of a decision without steps they are 0."""
    totals = {name: sum(each.count for each in found) or 1 for name, found in space.items()}
    return {
        (name, each.name): (each.count / totals[name], each.is_found) for name, found in space.items() for each in found
    }


class _NamedDecision(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def value(self) -> object: ...

    @property
    def candidates(self) -> tuple[Any, ...]: ...


AnyDecision = TypeVar("AnyDecision", bound=_NamedDecision)


def alike(decisions: Sequence[AnyDecision]) -> Iterator[tuple[str, list[AnyDecision]]]:
    """Yield decisions one after the other that differ in the number in their names alone, and what to call them.

    Example:
        >>> one, two = (Decided(f"kernel_{i}", "k3", ("k3", "k5"), 2) for i in range(2))
        >>> [name for name, _ in alike([one, two])]
        ['kernel_0 .. kernel_1 (2)']
    """

    def family(name: str) -> str:
        begin, _, number = name.rpartition("_")
        return begin if number.isdigit() and begin else name

    for _, group in groupby(decisions, key=lambda each: (family(each.name), each.candidates, each.value)):
        found = list(group)
        first, last = found[0].name, found[-1].name
        yield (first if len(found) == 1 else f"{first} .. {last} ({len(found)})"), found


def _content(run_dir: Path, file: str) -> tuple[dict[str, Any], list[str]]:
    try:
        return read_json(run_dir, file) or {}, []
    except RunFileError as error:
        return {}, [f"{file} could not be read: {error}"]


def _record(problem: object, content: dict[Any, Any]) -> ModelRecord:
    nodes: dict[str, ModelNode] = {}
    for each in map(as_dict, _list(content.get("nodes"), MAX_NODES)):
        name = _text(each.get("id"))
        if name and name not in nodes:
            # Of nodes before it alone: a graph of a stranger's has no cycles either.
            inputs = dict.fromkeys(_text(one) for one in _list(each.get("inputs"), MAX_INPUTS))
            known = tuple(one for one in inputs if one in nodes)
            sizes = _list(each.get("shape"), 10)
            shape = TIMES.join(map(str, sizes)) if all(type(size) is int for size in sizes) else ""
            pairs = [_list(one, 2) for one in _list(each.get("stands_for"), MAX_CANDIDATES)]
            stands_for = tuple((_text(one[0]), _text(one[1])) for one in pairs if len(one) == 2)
            nodes[name] = ModelNode(name, _text(each.get("kind")), known, shape, _text(each.get("mutator")), stands_for)
    decisions = _list(content.get("decisions"), MAX_DECISIONS)
    decided = tuple(_decided(each) for each in decisions if isinstance(each, dict))
    return ModelRecord(_text(problem), tuple(nodes.values()), decided, _count(content.get("num_parameters")))


def _decided(content: dict[Any, Any]) -> Decided:
    candidates = tuple(_text(each) for each in _list(content.get("candidates"), MAX_CANDIDATES))
    count = max(_count(content.get("num_candidates")) or 0, len(candidates))
    return Decided(_text(content.get("name")), _text(content.get("value")), candidates, count)


def _space(counted: dict[str, dict[Any, Any]], found: dict[str, dict[Any, Any]]) -> SpacePaths:
    space: SpacePaths = {}
    for name, content in counted.items():
        learned = found.get(name, {})
        names, taken = map(_text, _list(learned.get("candidates"), MAX_CANDIDATES)), _text(learned.get("found"))
        likely = dict(zip(names, _list(learned.get("probabilities"), MAX_CANDIDATES), strict=False))
        pairs = zip(_list(content.get("candidates"), MAX_CANDIDATES), _list(content.get("counts"), MAX_CANDIDATES),
                    strict=False)  # fmt: skip
        space[name] = [
            TrainedCandidate(text := _text(each), _count(count) or 0, _probability(likely.get(text)), text == taken)
            for each, count in pairs
        ]
    return {name: each for name, each in space.items() if each}


def _decisions(value: object) -> dict[str, dict[Any, Any]]:
    found = map(as_dict, _list(value, MAX_DECISIONS))
    return {_text(each["name"]): each for each in found if each.get("name")}


def _list(value: object, most: int) -> list[Any]:
    return value[:most] if isinstance(value, list) else []


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    return shortened(escape(str(value)[: 10 * MAX_NAME]), MAX_NAME)


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def _probability(value: object) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value <= 1 else None  # type: ignore[arg-type,operator]


@dataclass(frozen=True)
class ModelBox:
    """Nodes, in their order, that are drawn as one box, and the numbers of the boxes that it reads."""

    nodes: tuple[ModelNode, ...]
    inputs: tuple[int, ...] = ()

    @property
    def num_changed(self) -> int:
        """How many of its nodes a mutator has made or changed."""
        return sum(bool(each.mutator) for each in self.nodes)


def model_parts(nodes: Sequence[ModelNode]) -> list[dict[int, ModelBox]]:
    """Return a graph as parts, one after the other: what no mutator has changed becomes a box with a count.

    Args:
        nodes: each reads nodes before it alone.

    Returns:
        the boxes of each part by their numbers. Of the part before, a part reads the last box alone.

    Example:
        >>> names, mutators = ["x", "a", "b", "c"], ["", "", "kernel", ""]
        >>> inputs = [(), ("x",), ("a",), ("b",)]
        >>> nodes = [ModelNode(*each[:1], "Linear", each[1], "", each[2]) for each in zip(names, inputs, mutators)]
        >>> [[len(box.nodes) for box in part.values()] for part in model_parts(nodes)]
        [[2], [1], [1]]
    """
    # Parameters and modes that a graph reads by name are none of its layers.
    kept = [each for each in nodes if each.kind != "get_attr" or each.mutator or each.inputs]
    parts: list[dict[int, ModelBox]] = []
    for region in _regions(kept):
        parts.append(_boxes(region, max(parts[-1]) + 1 if parts else 0))
    return parts


def _regions(nodes: Sequence[ModelNode]) -> list[list[ModelNode]]:
    """Return the pieces between nodes through which all passes, those together that no mutator has changed."""
    last_use = {one: place for place, each in enumerate(nodes) for one in each.inputs}
    found: list[list[ModelNode]] = []
    region: list[ModelNode] = []
    reach = 0
    for place, each in enumerate(nodes):
        region.append(each)
        if reach <= place:
            is_joined = found and not _is_changed(region) and not _is_changed(found[-1])
            found[-1 if is_joined else len(found) :] = [found[-1] + region if is_joined else region]
            region = []
        reach = max(reach, last_use.get(each.id, place))
    return found


def _is_changed(nodes: Sequence[ModelNode]) -> bool:
    return any(each.mutator for each in nodes)


def _boxes(region: Sequence[ModelNode], first: int) -> dict[int, ModelBox]:
    """Return the boxes of a region; what its nodes read from outside is the box before `first`."""
    before = (first - 1,) if first else ()
    whole = {first: ModelBox(tuple(region), before)}
    if len(region) == 1 or not _is_changed(region):
        return whole
    groups = _chains(region)
    numbers = {node.id: number for number, group in enumerate(groups, first) for node in group}
    boxes: dict[int, ModelBox] = {}
    depth, num_links = dict.fromkeys(before, 0), 0
    for number, group in enumerate(groups, first):
        inputs = tuple(each for each in dict.fromkeys(numbers.get(one, first - 1) for one in group[0].inputs)
                       if each in depth)  # fmt: skip
        boxes[number] = ModelBox(tuple(group), inputs)
        depth[number] = 1 + max((depth[each] for each in inputs), default=0)
        num_links += sum(depth[number] - depth[each] for each in inputs)
    return boxes if num_links <= MAX_LINKS else whole


def _chains(region: Sequence[ModelNode]) -> list[list[ModelNode]]:
    """Return the nodes; an unchanged one that alone reads an unchanged one is together with it."""
    readers = Counter(one for each in region for one in each.inputs)
    groups: dict[str, list[ModelNode]] = {}
    found: list[list[ModelNode]] = []
    for each in region:
        is_alone = len(each.inputs) == 1 and readers[each.inputs[0]] == 1
        group = groups.get(each.inputs[0], []) if is_alone else []
        if not group or each.mutator or group[-1].mutator:
            group = []
            found.append(group)
        group.append(each)
        groups[each.id] = group
    return found
