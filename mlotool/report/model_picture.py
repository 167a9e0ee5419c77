"""The graph of a model as inline SVG, and its decisions as a table."""

from collections import Counter
from collections.abc import Mapping, Sequence

from mlotool.report.formats import shortened, shortened_key
from mlotool.report.graph_layout import Point
from mlotool.report.graph_picture import curve, text_width
from mlotool.report.markup import Markup, details, element
from mlotool.report.model_blocks import ModelBox, model_parts
from mlotool.report.model_layout import HEIGHT, PlacedBox, arrange_model
from mlotool.report.model_nodes import ModelRecord, alike
from mlotool.report.palette import variable

ARROW = 6.0
MAX_CHARACTERS = 34
MAX_ROWS = 40
"""Of decisions that are shown without being asked for."""

CHANGED, UNCHANGED = "problem-1", "muted"


Shares = Mapping[tuple[str, str], tuple[float, bool]]
"""By decision and candidate, its share of the training steps, and whether the search has found it."""


def model_section(record: ModelRecord, shares: Shares | None = None) -> list[Markup]:
    """Return the graph and the decisions of a model as cards.

    Args:
        record: of the model.
        shares: of a shared space, what stands in the boxes of its candidates.
    """
    parts: list[Markup] = []
    if record.nodes:
        picture = element("div", _picture(record, shares or {}), class_="graph")
        parts.append(element("div", element("h3", _title(record)), picture, _key(shares or {}), class_="card"))
    elif record.num_parameters is not None:
        parts.append(element("p", _title(record), class_="muted"))
    if record.decisions:
        parts.append(_decisions(record))
    return parts


def _title(record: ModelRecord) -> str:
    count = "" if record.num_parameters is None else f"{record.num_parameters:,} parameters"
    changed = sum(bool(each.mutator) for each in record.nodes)
    nodes = f"{len(record.nodes)} nodes, {changed} of them changed" if record.nodes else ""
    return f"{record.problem}: {', '.join(filter(None, (count, nodes)))}"


def _key(shares: Shares) -> Markup:
    texts = {"box changed": "made or changed by a mutator, with its name", "box": "as in the base"}
    if shares:
        texts["box changed"] += "; of a candidate the share of the training steps that have computed it"
    if any(is_found for _, is_found in shares.values()):
        texts = {"box found": "★ what the search has found", **texts}
    return element(
        "p", *(element("span", element("i", class_=kind), text) for kind, text in texts.items()), class_="key muted"
    )


def _picture(record: ModelRecord, shares: Shares) -> Markup:
    parts = model_parts(record.nodes)
    boxes = {number: box for part in parts for number, box in part.boxes.items()}
    lines = {number: _lines(box, shares) for number, box in boxes.items()}
    layout = arrange_model(parts, {number: _width(each) for number, each in lines.items()})
    drawn = [_wire(points) for _, _, points in layout.wires] + [_path(points) for points in layout.jumps]
    for number, box in boxes.items():
        is_found = len(box.nodes) == 1 and any(shares.get(one, (0, False))[1] for one in box.nodes[0].stands_for)
        drawn.append(_box(layout.boxes[number], box, lines[number], is_found=is_found))
    return element(
        "svg",
        *drawn,
        viewBox=f"0 0 {layout.width:.0f} {layout.height:.0f}",
        # Never larger than life, and on a phone never so small that it cannot be read: the frame scrolls.
        style=f"width:100%;max-width:{layout.width:.0f}px;min-width:{layout.width * 0.75:.0f}px",
        role="img",
        aria_label=f"Graph of the model of {record.problem}",
    )


def _lines(box: ModelBox, shares: Shares) -> tuple[str, str, str]:
    """Return what a box is, the mutator's name or the candidate's with its share, and a line below."""
    last = box.nodes[-1]
    if len(box.nodes) == 1:
        facts = [shortened_key(last.id, MAX_CHARACTERS), last.shape]
        known = [(name, *shares[name, value], value) for name, value in last.stands_for if (name, value) in shares]
        said = shortened(last.mutator, 14)
        if known:
            _, share, is_found, value = known[0]
            said = f"{shortened(value, 14)} {'★ ' if is_found else ''}{100 * share:.0f}%"
        return shortened(last.kind, 20), said, " · ".join(filter(None, facts))
    changed = f", {box.num_changed} changed" if box.num_changed else ""
    kinds = Counter(each.kind for each in box.nodes if each.kind not in ("placeholder", "output"))
    some = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.most_common(3))
    return f"{len(box.nodes)} nodes{changed}", "", shortened(some, MAX_CHARACTERS)


def _width(lines: tuple[str, str, str]) -> float:
    first = f"{lines[0]} {lines[1]}" if lines[1] else lines[0]
    return max(120.0, text_width(first, 13.5) + 26, text_width(lines[2], 11.5) + 24)


def _box(place: PlacedBox, box: ModelBox, lines: tuple[str, str, str], *, is_found: bool) -> Markup:
    kinds = ["node", *(["changed"] if box.num_changed else []), *(["found"] if is_found else [])]
    rect = element(
        "rect",
        x=f"{place.x - place.width / 2:.1f}",
        y=f"{place.y:.1f}",
        width=f"{place.width:.1f}",
        height=f"{HEIGHT:.0f}",
        rx=8,
        class_=" ".join(kinds),
    )
    mutator = [element("tspan", lines[1], dx=6, class_="node-mutator")] if lines[1] else []
    what = element("text", lines[0], *mutator, x=f"{place.x:.1f}", y=f"{place.y + 19:.1f}", class_="node-name")
    below = element("text", lines[2], x=f"{place.x:.1f}", y=f"{place.y + 36:.1f}", class_="node-fact")
    return element("g", element("title", _said(box)), rect, what, below)


def _said(box: ModelBox) -> str:
    """Return what a box says when it is pointed at."""
    first, last = box.nodes[0], box.nodes[-1]
    if len(box.nodes) == 1:
        candidates = [f"{value} of {name}" for name, value in first.stands_for]
        facts = (first.id, first.kind, first.shape, f"by {first.mutator}" if first.mutator else "", *candidates)
        return ", ".join(filter(None, facts))
    return f"{first.id} to {last.id}" + (f", {last.shape}" if last.shape else "")


def _wire(points: Sequence[Point]) -> Markup:
    *before, last = points
    neck = (last[0], last[1] - ARROW)
    tip = f"M{last[0]:.1f},{last[1]:.1f} L{neck[0] - 4:.1f},{neck[1]:.1f} L{neck[0] + 4:.1f},{neck[1]:.1f} z"
    line = element("path", d=curve([*before, neck]), class_="node-wire")
    return element("g", line, element("path", d=tip, fill=variable("muted")))


def _path(points: Sequence[Point]) -> Markup:
    return element("path", d="M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points), class_="node-wire")


def _decisions(record: ModelRecord) -> Markup:
    texts = ("decision", "among") if record.is_shared else ("decision", "taken", "among")
    heads = element("tr", *(element("th", text, scope="col") for text in texts))
    groups = list(alike(record.decisions))
    rows = []
    for name, found in groups:
        first = found[0]
        left = first.num_candidates - len(first.candidates)
        among = ", ".join(first.candidates) + (f", and {left} more" if left else "")
        # A shared space has all candidates at once.
        taken = () if record.is_shared else (element("td", element("b", first.value)),)
        rows.append(element("tr", element("th", name, scope="row"), *taken, element("td", among, class_="text")))
    table = element("table", element("thead", heads), element("tbody", *rows))
    title = f"{len(record.decisions)} decision{'s' if len(record.decisions) != 1 else ''} of {record.problem}"
    if len(rows) > MAX_ROWS:
        return details(title, element("div", table, class_="scroll"))
    return element("div", element("h3", title), table, class_="card scroll decisions")
