"""What the model spaces of a run became: nodes.json of a run folder, which may be a stranger's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mlotool.core.errors import RunFileError
from mlotool.core.messages import escape
from mlotool.core.run_files import read_json
from mlotool.report.formats import shortened
from mlotool.report.run_folder import as_dict

FILE = "nodes.json"
MAX_PROBLEMS = 20
MAX_NODES = MAX_DECISIONS = 2_000
MAX_INPUTS = MAX_CANDIDATES = 50
MAX_NAME = 120
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
    """A decision.

    Args:
        name: its own.
        value: the candidate that was taken.
        candidates: the first ones of them.
        num_candidates: how many there are.
    """

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


class _NamedDecision(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def value(self) -> object: ...

    @property
    def candidates(self) -> tuple[Any, ...]: ...


AnyDecision = TypeVar("AnyDecision", bound=_NamedDecision)


def read_models(run_dir: Path) -> tuple[list[ModelRecord], list[str]]:
    """Return the models that a run folder tells of, and notes on what could not be read."""
    try:
        content = read_json(run_dir, FILE) or {}
    except RunFileError as error:
        return [], [f"{FILE} could not be read: {error}"]
    problems = as_dict(content.get("problems"))
    found = [_record(name, as_dict(each)) for name, each in list(problems.items())[:MAX_PROBLEMS]]
    return [each for each in found if each.nodes or each.decisions], []


def alike(decisions: Sequence[AnyDecision]) -> Iterator[tuple[str, list[AnyDecision]]]:
    """Yield decisions one after the other that differ in the number in their names alone, and what to call them.

    Example:
        >>> one, two = (Decided(f"kernel_{i}", "k3", ("k3", "k5"), 2) for i in range(2))
        >>> [name for name, _ in alike([one, two])]
        ['kernel_0 .. kernel_1 (2)']
    """
    for _, group in groupby(decisions, key=lambda each: (_family(each.name), each.candidates, each.value)):
        found = list(group)
        first, last = found[0].name, found[-1].name
        yield (first if len(found) == 1 else f"{first} .. {last} ({len(found)})"), found


def _family(name: str) -> str:
    """Return what a name begins with: `kernel` of `kernel_0`."""
    begin, _, number = name.rpartition("_")
    return begin if number.isdigit() and begin else name


def _record(problem: object, content: dict[Any, Any]) -> ModelRecord:
    nodes: dict[str, ModelNode] = {}
    for each in _mappings(content.get("nodes"), MAX_NODES):
        name = _text(each.get("id"))
        if name and name not in nodes:
            # Of nodes before it alone: a graph of a stranger's has no cycles either.
            inputs = dict.fromkeys(_text(one) for one in _list(each.get("inputs"), MAX_INPUTS))
            known = tuple(one for one in inputs if one in nodes)
            kind, shape, mutator = _text(each.get("kind")), _shape(each.get("shape")), _text(each.get("mutator"))
            pairs = [_list(one, 2) for one in _list(each.get("stands_for"), MAX_CANDIDATES)]
            stands_for = tuple((_text(one[0]), _text(one[1])) for one in pairs if len(one) == 2)
            nodes[name] = ModelNode(name, kind, known, shape, mutator, stands_for)
    decisions = tuple(_decided(each) for each in _mappings(content.get("decisions"), MAX_DECISIONS))
    count = content.get("num_parameters")
    is_count = isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 10**18
    return ModelRecord(_text(problem), tuple(nodes.values()), decisions, count if is_count else None)


def _decided(content: dict[Any, Any]) -> Decided:
    candidates = tuple(_text(each) for each in _list(content.get("candidates"), MAX_CANDIDATES))
    count = content.get("num_candidates")
    is_count = isinstance(count, int) and not isinstance(count, bool) and len(candidates) <= count < 10**6
    num_candidates = count if is_count and isinstance(count, int) else len(candidates)
    return Decided(_text(content.get("name")), _text(content.get("value")), candidates, num_candidates)


def _mappings(value: object, most: int) -> list[dict[Any, Any]]:
    return [each for each in _list(value, most) if isinstance(each, dict)]


def _list(value: object, most: int) -> list[Any]:
    return value[:most] if isinstance(value, list) else []


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    return shortened(escape(str(value)[: 10 * MAX_NAME]), MAX_NAME)


def _shape(value: object) -> str:
    sizes = _list(value, 10)
    return TIMES.join(map(str, sizes)) if all(type(each) is int for each in sizes) else ""
