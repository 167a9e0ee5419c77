"""What the model spaces of a run became, from nodes.json and paths.json of its folder, which may be a stranger's."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, TypeAdapter
from pydantic.dataclasses import dataclass

from mlotool.core.errors import RunFileError
from mlotool.core.messages import escape
from mlotool.folders.run_folder import RunFolder
from mlotool.report.formats import shortened
from mlotool.report.recorded_run import UNREADABLE

MAX_PROBLEMS, MAX_NAME = 20, 120
MAX_NODES = MAX_DECISIONS = 2_000
MAX_CANDIDATES = 50
# Wires of a piece of a graph; a piece with more is one box.
MAX_LINKS = 500

TIMES = "\N{MULTIPLICATION SIGN}"


def _text(value: object) -> str:
    return "" if value is None else shortened(escape(str(value)[: 10 * MAX_NAME]), MAX_NAME)


def _times(sizes: Sequence[Any]) -> str:
    return TIMES.join(map(str, sizes))


def _first(most: int) -> Any:
    return BeforeValidator(lambda values: values[:most])


# Whatever stands in a file is a short text on one page.
Text = Annotated[str, BeforeValidator(_text)]
Shape = Annotated[str, BeforeValidator(lambda sizes: _text(sizes if isinstance(sizes, str) else _times(sizes or ())))]
Names = Annotated[tuple[Text, ...], _first(MAX_CANDIDATES)]


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

    id: Text
    kind: Text
    inputs: Names
    shape: Shape
    mutator: Text
    stands_for: Annotated[tuple[tuple[Text, Text], ...], _first(MAX_CANDIDATES)] = ()


@dataclass(frozen=True)
class Decided:
    """A decision: its name, the candidate that was taken, the first candidates, and how many there are."""

    name: Text
    value: Text
    candidates: Names
    num_candidates: int


@dataclass(frozen=True)
class ModelRecord:
    """The model of one problem.

    Args:
        nodes: in the order in which they are computed; empty where they were not written.
        decisions: in the order in which they were made.
        num_parameters: None where it is not known.
        problem: its name.
    """

    nodes: Annotated[tuple[ModelNode, ...], _first(MAX_NODES)]
    decisions: Annotated[tuple[Decided, ...], _first(MAX_DECISIONS)]
    num_parameters: int | None
    problem: Text = ""

    @property
    def is_shared(self) -> bool:
        """Whether it has several candidates of a decision at once, so that none is taken."""
        return any(node.stands_for for node in self.nodes)


@dataclass(frozen=True)
class TrainedCandidate:
    """A candidate of a decision of a shared space.

    Args:
        name: its own.
        count: training steps that have computed it.
        probability: of an architecture; None where there is none.
        is_found: whether the search has found it.
    """

    name: Text
    count: int
    probability: float | None
    is_found: bool


SpacePaths = dict[str, list[TrainedCandidate]]
# The share of the training steps of each candidate of a decision, and whether the search has found it.
Shares = dict[tuple[str, str], tuple[float, bool]]


def read_models(folder: RunFolder) -> tuple[list[ModelRecord], list[str]]:
    """Return the models that a run folder tells of, and a note where they could not be read."""

    def records(content: dict[str, Any]) -> list[ModelRecord]:
        return [_record(problem, record) for problem, record in _items(content["problems"])]

    models, notes = _read(folder, folder.NODES, records)
    return [model for model in models if model.nodes or model.decisions], notes


def read_paths(folder: RunFolder) -> tuple[dict[str, SpacePaths], list[str]]:
    """Return the shared spaces of a run folder by problem, and a note where they could not be read."""

    def spaces(content: dict[str, Any]) -> list[tuple[str, SpacePaths]]:
        learned = {row["name"]: row for _, names in _items(content["architectures"]) for row in names[:MAX_DECISIONS]}
        return [(_text(name), _space(counted, learned)) for name, counted in _items(content["spaces"])]

    problems, notes = _read(folder, folder.PATHS, spaces)
    return {name: space for name, space in problems if space}, notes


def _read(folder: RunFolder, file: str, build: Callable[[dict[str, Any]], list[Any]]) -> tuple[list[Any], list[str]]:
    try:
        content = folder.json(file)
        return [] if content is None else build(content), []
    except (RunFileError, *UNREADABLE) as error:
        return [], [f"{file} could not be read: {error}"]


def _items(content: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(content.items())[:MAX_PROBLEMS]


def _record(problem: str, content: dict[str, Any]) -> ModelRecord:
    record = TypeAdapter(ModelRecord).validate_python({**content, "problem": problem})
    nodes: dict[str, ModelNode] = {}
    for node in record.nodes:
        # Of nodes before it alone: a graph of a stranger's has no cycles either.
        known = tuple(name for name in dict.fromkeys(node.inputs) if name in nodes)
        nodes.setdefault(node.id, replace(node, inputs=known))
    return replace(record, nodes=tuple(nodes.values()))


def _space(counted: list[dict[str, Any]], learned: dict[str, dict[str, Any]]) -> SpacePaths:
    space: SpacePaths = {}
    for row in counted[:MAX_DECISIONS]:
        architecture = learned.get(row["name"], {"candidates": [], "probabilities": [], "found": None})
        likely = dict(zip(map(_text, architecture["candidates"]), architecture["probabilities"], strict=True))
        pairs = list(zip(map(_text, row["candidates"]), row["counts"], strict=True))[:MAX_CANDIDATES]
        best = _text(architecture["found"])
        space[_text(row["name"])] = [TrainedCandidate(name, num, likely.get(name), name == best) for name, num in pairs]
    return space


def shares(space: SpacePaths) -> Shares:
    """Return the shares of the candidates of a space; of a decision without steps they are 0."""
    return {
        (name, candidate.name): (candidate.count / (sum(other.count for other in candidates) or 1), candidate.is_found)
        for name, candidates in space.items()
        for candidate in candidates
    }


def alike(decisions: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield decisions that differ from the one before in more than the number in their names, and what to call them.

    Example:
        >>> one, two = (Decided(f"kernel_{i}", "k3", ("k3", "k5"), 2) for i in range(2))
        >>> [name for name, _ in alike([one, two])]
        ['kernel_0 .. kernel_1 (2)']
    """

    def family(decision: Any) -> tuple[Any, ...]:
        begin, _, number = decision.name.rpartition("_")
        name = begin if number.isdigit() and begin else decision.name
        return name, decision.candidates, decision.value

    for _, group in groupby(decisions, key=family):
        first, *others = group
        yield (f"{first.name} .. {others[-1].name} ({1 + len(others)})" if others else first.name), first


class ModelBox(NamedTuple):
    """Nodes, in their order, that are drawn as one box, and the numbers of the boxes that they read."""

    nodes: tuple[ModelNode, ...]
    inputs: tuple[int, ...] = ()

    @property
    def num_changed(self) -> int:
        """How many of its nodes a mutator has made or changed."""
        return sum(bool(node.mutator) for node in self.nodes)


def model_boxes(nodes: Sequence[ModelNode]) -> list[ModelBox]:
    """Return a graph as boxes: a piece that no mutator has changed is one box with a count.

    Args:
        nodes: each reads nodes before it alone.

    Example:
        >>> names, mutators = ["x", "a", "b", "c"], ["", "", "kernel", ""]
        >>> inputs = [(), ("x",), ("a",), ("b",)]
        >>> nodes = [ModelNode(name, "Linear", *rest) for name, *rest in zip(names, inputs, [""] * 4, mutators)]
        >>> [len(box.nodes) for box in model_boxes(nodes)]
        [2, 1, 1]
    """
    # Parameters and modes that a graph reads by name are none of its layers.
    kept = [node for node in nodes if node.kind != "get_attr" or node.mutator or node.inputs]
    groups = []
    for region in _regions(kept):
        is_drawn = _is_changed(region) and sum(len(node.inputs) for node in region) <= MAX_LINKS
        groups += [[node] for node in region] if is_drawn else [region]
    number_of = {node.id: number for number, group in enumerate(groups) for node in group}
    boxes = []
    for number, group in enumerate(groups):
        sources = {number_of[name] for node in group for name in node.inputs if name in number_of}
        boxes.append(ModelBox(tuple(group), tuple(sorted(sources - {number}))))
    return boxes


def _regions(nodes: Sequence[ModelNode]) -> list[list[ModelNode]]:
    """Return the pieces between nodes through which all passes, those together that no mutator has changed."""
    last_use = {name: place for place, node in enumerate(nodes) for name in node.inputs}
    regions: list[list[ModelNode]] = []
    region: list[ModelNode] = []
    reach = 0
    for place, node in enumerate(nodes):
        region.append(node)
        if reach <= place:
            if regions and not _is_changed(region) and not _is_changed(regions[-1]):
                regions[-1] += region
            else:
                regions.append(region)
            region = []
        reach = max(reach, last_use.get(node.id, place))
    return regions


def _is_changed(nodes: Sequence[ModelNode]) -> bool:
    return any(node.mutator for node in nodes)
