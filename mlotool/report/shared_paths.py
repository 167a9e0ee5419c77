"""The paths of shared spaces: how often each candidate was trained, and the found one; from paths.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlotool.core.errors import RunFileError
from mlotool.core.messages import escape
from mlotool.core.run_files import read_json
from mlotool.report.formats import number, shortened
from mlotool.report.markup import Markup, details, element
from mlotool.report.palette import variable
from mlotool.report.run_folder import as_dict

FILE = "paths.json"
MAX_PROBLEMS = 20
MAX_DECISIONS = 500
MAX_CANDIDATES = 50
MAX_NAME = 120
MAX_COUNT = 10**15
MAX_ROWS = 120
"""Candidates that are shown without being asked for."""


@dataclass(frozen=True)
class TrainedCandidate:
    """A candidate of a decision.

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


def read_paths(run_dir: Path) -> tuple[dict[str, SpacePaths], list[str]]:
    """Return the shared spaces of a run folder by problem, and notes on what could not be read."""
    try:
        content = read_json(run_dir, FILE) or {}
    except RunFileError as error:
        return {}, [f"{FILE} could not be read: {error}"]
    architectures = [_decisions(each) for each in list(as_dict(content.get("architectures")).values())[:MAX_PROBLEMS]]
    found = {name: each for one in architectures for name, each in one.items()}
    spaces = list(as_dict(content.get("spaces")).items())[:MAX_PROBLEMS]
    read = {_text(name): _space(_decisions(each), found) for name, each in spaces}
    return {name: each for name, each in read.items() if each}, []


def shares(space: SpacePaths) -> dict[tuple[str, str], tuple[float, bool]]:
    """Return, by decision and candidate, its share of the training steps of the decision, and whether it was found.

    Of a decision without steps the shares are 0.
    """
    totals = {name: sum(each.count for each in found) or 1 for name, found in space.items()}
    return {
        (name, each.name): (each.count / totals[name], each.is_found) for name, found in space.items() for each in found
    }


def paths_card(problem: str, space: SpacePaths) -> Markup:
    """Return a table of the candidates by decision, each with a bar beside the most trained one of its decision."""
    has_probability = any(each.probability is not None for found in space.values() for each in found)
    texts = ["candidate", "training steps", *(["probability"] if has_probability else [])]
    heads = element("tr", *(element("th", text, scope="col") for text in texts))
    rows: list[Markup] = []
    for name, candidates in space.items():
        rows.append(element("tr", element("th", name, colspan=len(texts), scope="rowgroup"), class_="group"))
        most = max((each.count for each in candidates), default=0)
        rows += [_row(each, most, has_probability) for each in candidates]
    table = element("table", element("thead", heads), element("tbody", *rows))
    title = f"{problem}: how often each candidate was trained"
    if any(each.is_found for found in space.values() for each in found):
        title += "; ★ is what the search has found"
    if len(rows) > MAX_ROWS:
        return details(title, element("div", table, class_="scroll"))
    return element("div", element("h3", title), table, class_="card scroll decisions")


def _row(candidate: TrainedCandidate, most: int, has_probability: bool) -> Markup:
    name = element("b", candidate.name, " ★") if candidate.is_found else candidate.name
    width = 100 * candidate.count / most if most else 0.0
    style = f"width:{width:.1f}%;background:{variable('problem-1' if candidate.is_found else 'problem-0')}"
    bar = element("div", element("i", style=style), class_="bar", aria_hidden="true")
    cells = [element("th", name, scope="row"), element("td", f"{candidate.count:,}", bar)]
    if has_probability:
        cells.append(element("td", number(candidate.probability)))
    return element("tr", *cells)


def _space(counted: dict[str, dict[Any, Any]], found: dict[str, dict[Any, Any]]) -> SpacePaths:
    space: SpacePaths = {}
    for name, content in counted.items():
        learned = found.get(name, {})
        names, counts = _list(content.get("candidates")), _list(content.get("counts"))
        probabilities = dict(
            zip(map(_text, _list(learned.get("candidates"))), _list(learned.get("probabilities")), strict=False)
        )
        taken = learned.get("found")
        space[name] = [
            TrainedCandidate(
                text := _text(each), _count(count), _probability(probabilities.get(text)), text == _text(taken)
            )
            for each, count in zip(names, counts, strict=False)
        ]
    return {name: each for name, each in space.items() if each}


def _decisions(value: object) -> dict[str, dict[Any, Any]]:
    found: Sequence[object] = value[:MAX_DECISIONS] if isinstance(value, list) else ()
    return {_text(each.get("name")): each for each in found if isinstance(each, dict) and each.get("name")}


def _list(value: object) -> list[Any]:
    return value[:MAX_CANDIDATES] if isinstance(value, list) else []


def _text(value: object) -> str:
    return shortened(escape(value[: 10 * MAX_NAME]), MAX_NAME) if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value <= MAX_COUNT else 0


def _probability(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= 1 else None  # type: ignore[operator,arg-type]
