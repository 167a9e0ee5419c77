"""Graphs as SVG: the problems of a program, and the model of a problem."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import networkx as nx
from markupsafe import Markup

from mlotool.report.formats import last_part, number, shortened, shortened_key, words
from mlotool.report.models import ModelBox, ModelRecord, Shares, alike, model_parts
from mlotool.report.page import render
from mlotool.report.run_folder import as_dict

Point = tuple[float, float]
Pair = tuple[Any, Any]

MARGIN, NUM_SWEEPS = 14.0, 8
BOX_HEIGHT, TAB_HEIGHT, ROW_HEIGHT = 78.0, 22.0, 152.0
NODE_HEIGHT, NODE_ROW = 46.0, 72.0
# The inside of the page on a screen, and the height from which a model is broken into columns.
PAGE_WIDTH, SHORT_COLUMN = 1040.0, 620.0
MAX_CHARACTERS = 34
# Of decisions that are shown without being asked for.
MAX_ROWS = 40


@dataclass
class Layout:
    """Where the nodes of a graph go, row by row from the top, and what its edges pass on their way down.

    Args:
        x: centre of each node.
        row: of each node, counted from the top.
        chains: by edge, the nodes and places beside nodes that it passes, both ends included.
        width: of all.
        num_rows: how many rows there are.
    """

    x: dict[Hashable, float] = field(default_factory=dict)
    row: dict[Hashable, int] = field(default_factory=dict)
    chains: dict[Pair, list[Hashable]] = field(default_factory=dict)
    width: float = 0.0
    num_rows: int = 0


def arrange(widths: Mapping[Any, float], edges: Sequence[Pair], gap: float, lane: float) -> Layout:
    """Lay a graph out in rows: a node stands above all that it leads to.

    A row is ordered by where the neighbours of its nodes are, as Sugiyama et al. (1981) do.

    Args:
        widths: of the nodes.
        edges: from an upper to a lower node.
        gap: between the nodes of a row.
        lane: width of the place that an edge takes beside the nodes of a row.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(widths)
    graph.add_edges_from(edges)
    # A cycle belongs to a graph that validation refuses; the page shows the rest.
    while not nx.is_directed_acyclic_graph(graph):
        graph.remove_edge(*nx.find_cycle(graph)[-1][:2])
    layers: list[list[Hashable]] = [list(each) for each in nx.topological_generations(graph.reverse())][::-1]
    layout = Layout(num_rows=len(layers), row={node: row for row, layer in enumerate(layers) for node in layer})
    links = nx.Graph()
    links.add_nodes_from(widths)
    for upper, lower in graph.edges:
        lanes: list[Hashable] = [(upper, lower, row) for row in range(layout.row[upper] + 1, layout.row[lower])]
        for row, each in enumerate(lanes, layout.row[upper] + 1):
            layers[row].append(each)
            layout.row[each] = row
        layout.chains[upper, lower] = [upper, *lanes, lower]
        nx.add_path(links, layout.chains[upper, lower])
    half = {node: widths.get(node, lane) / 2 for node in layout.row}
    layout.x = dict.fromkeys(layout.row, 0.0)
    for sweep in range(NUM_SWEEPS):
        for layer in layers[:: -1 if sweep % 2 else 1]:
            wanted = {node: _mean([layout.x[each] for each in links[node]] or [layout.x[node]]) for node in layer}
            layer.sort(key=wanted.__getitem__)
            right = float("-inf")
            for node in layer:
                layout.x[node] = max(wanted[node], right + half[node])
                right = layout.x[node] + half[node] + gap
            excess = _mean([layout.x[node] - wanted[node] for node in layer])
            layout.x |= {node: layout.x[node] - excess for node in layer}
    left = min(layout.x[node] - half[node] for node in layout.x) - MARGIN
    layout.x = {node: x - left for node, x in layout.x.items()}
    layout.width = max(layout.x[node] + half[node] for node in layout.x) + MARGIN
    return layout


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def text_width(text: str, size: float) -> float:
    """Return about how wide a text is, in pixels."""
    # No font to measure: a sans-serif letter is a little over half as wide as its size.
    return 0.56 * size * len(text)


def wire(points: Sequence[Point], arrow: float, half: float) -> dict[str, str]:
    """Return an SVG path that leaves and reaches every row vertically, and its arrowhead."""
    *before, (x, y) = points
    neck = y + (arrow if before[-1][1] > y else -arrow)
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise([*before, (x, neck)]):
        middle = (y0 + y1) / 2
        path += f" C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"
    tip = f"M{x:.1f},{y:.1f} L{x - half:.1f},{neck:.1f} L{x + half:.1f},{neck:.1f} z"
    return {"path": path, "tip": tip}


def problem_graph(config: Mapping[str, Any], colours: Mapping[str, str]) -> Markup | None:
    """Draw the problems of a resolved config: solid wires shape, dashed ones carry a solution; None without any."""
    problems = {str(name): as_dict(value) for name, value in as_dict(config.get("problems")).items()}
    if not problems:
        return None
    graph = as_dict(config.get("graph"))
    shapes = [(a, b) for a, b in _edges(graph.get("upper_to_lower")) if {a, b} <= {*problems} and a != b]
    solutions = [(b, a) for a, b in _edges(graph.get("lower_to_upper")) if {a, b} <= {*problems} and a != b]
    lines = {name: _problem_lines(name, problem) for name, problem in problems.items()}
    tabs = {lower: _hypergradient(problems[lower], config) for _, lower in solutions}
    tab_widths = {name: text_width(text, 11.5) + 22 for name, text in tabs.items()}
    # All of one width, so that the wires between a problem and the one below it run straight.
    names = (max(text_width(text[0], 16) + 60, *(text_width(line, 12.5) + 44 for line in text[1:]))
             for text in lines.values())  # fmt: skip
    width = max([170.0, *names, *(tab + 88 for tab in tab_widths.values())])
    layout = arrange(dict.fromkeys(problems, width), list(dict.fromkeys([*shapes, *solutions])), 44.0, 30.0)
    wires = []
    for place, (upper, lower) in [*_places(layout, shapes), *((None, pair) for pair in solutions)]:
        if (upper, lower) in layout.chains:
            points = _problem_points(layout, (upper, lower), tab_widths.get(lower, -44.0), width, place)
            title = f"{upper} {'reads the solution of' if place is None else 'shapes'} {lower}"
            style = {"colour": colours[lower if place is None else upper], "is_solution": place is None}
            wires.append({**wire(points, 8.0, 5.0), "title": title, **style})
    boxes = [
        {"x": layout.x[name], "y": _top(layout, name), "lines": lines[name], "tab": tabs.get(name),
         "tab_width": tab_widths.get(name), "colour": colours[name]}
        for name in problems
    ]  # fmt: skip
    height = _top(layout, min(problems, key=lambda name: -layout.row[name])) + BOX_HEIGHT + MARGIN
    return render("problems.svg", wires=wires, boxes=boxes, box_width=width, width=layout.width, height=height)


def _places(layout: Layout, shapes: Sequence[Pair]) -> list[tuple[int, Pair]]:
    """Return for each pair how many others arrive at its lower problem on the same side, nearer to the middle."""
    count: Counter[tuple[Any, bool]] = Counter()
    places = []
    for pair in sorted(shapes, key=lambda pair: abs(layout.x[pair[0]] - layout.x[pair[1]])):
        side = pair[1], pair in layout.chains and layout.x[layout.chains[pair][-2]] > layout.x[pair[1]]
        places.append((count[side], pair))
        count[side] += 1
    return places


def _top(layout: Layout, node: Hashable) -> float:
    return MARGIN + layout.row[node] * ROW_HEIGHT


def _problem_points(layout: Layout, pair: Pair, tab: float, width: float, place: int | None) -> list[Point]:
    """Return what a wire passes.

    A solution (without a place) leaves from the tab on top of the lower problem, however many read it; what shapes the
    problem arrives beside the tab, on the side it comes from, the first one nearest to it. So no two wires of
    neighbouring rows cross without need.
    """
    upper, *lanes, lower = layout.chains[pair]
    x, top = layout.x[lower], _top(layout, lower)
    side = 1 if layout.x[layout.chains[pair][-2]] > x else -1
    beside = 0.0 if place is None else side * min(tab / 2 + 22 + 16 * place, width / 2 - 12)
    # At the upper problem the wires are in the order in which they arrive below.
    room, ahead = width / 2 - 18, layout.x[layout.chains[pair][1]] - layout.x[upper]
    foot = layout.x[upper] + min(max(0.4 * ahead, 60 - room), room - 60) + min(max(beside, -60), 60)
    points = [(foot, _top(layout, upper) + BOX_HEIGHT)]
    for lane in lanes:
        at = layout.x[lane] + (6 if place is None else -6)
        points += [(at, _top(layout, lane)), (at, _top(layout, lane) + BOX_HEIGHT)]
    points.append((x + beside, top - (TAB_HEIGHT if place is None else 0)))
    return points[::-1] if place is None else points


def _edges(edges: object) -> list[Pair]:
    pairs = []
    for start, ends in as_dict(edges).items():
        pairs += [(str(start), str(end)) for end in (ends if isinstance(ends, list) else [ends])]
    return list(dict.fromkeys(pairs))


def _problem_lines(name: str, problem: Mapping[str, Any]) -> list[str]:
    module = last_part(as_dict(problem.get("module")).get("_target_", "module"))
    optimizer = as_dict(problem.get("optimizer"))
    facts = [last_part(optimizer["_target_"])] if "_target_" in optimizer else []
    if isinstance(optimizer.get("lr"), int | float | str):
        facts.append(f"lr {number(optimizer['lr'])}")
    steps = problem.get("unroll_steps")
    if isinstance(steps, int) and steps > 1:
        facts.append(f"{steps} steps")
    return [shortened(name, 26), shortened(module, 36), shortened(" · ".join(facts), 40)]


def _hypergradient(problem: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    chosen = as_dict(problem.get("hypergradient")) or as_dict(config.get("hypergradient"))
    if "_target_" not in chosen:
        return "solution"
    parts = [last_part(chosen["_target_"])]
    solver = as_dict(chosen.get("solver")).get("_target_")
    parts += [last_part(part) for part in (solver, chosen.get("product")) if part]
    return shortened(" · ".join(words(part) for part in parts), 48)


def model_section(record: ModelRecord, shares: Shares | None = None) -> Markup:
    """Return the graph and the decisions of a model as cards.

    Args:
        record: of the model.
        shares: of a shared space, what stands in the boxes of its candidates.
    """
    rows = []
    for name, found in alike(record.decisions):
        left = found[0].num_candidates - len(found[0].candidates)
        among = ", ".join(found[0].candidates) + (f", and {left} more" if left else "")
        rows.append((name, found[0].value, among))
    values = {"graph": _model_graph(record, shares or {}), "shares": shares or {}, "max_rows": MAX_ROWS}
    changed = sum(bool(each.mutator) for each in record.nodes)
    return render("model.html", model=record, rows=rows, num_changed=changed, **values).strip()


def _model_graph(record: ModelRecord, shares: Shares) -> dict[str, Any] | None:
    """Return the parts of a model's graph as they are drawn, and in how many columns."""
    if not record.nodes:
        return None
    parts: list[dict[str, Any]] = []
    for part in model_parts(record.nodes):
        parts.append(model_part(part, shares, parts[-1]["offset"] if parts else 0.0))
    widest, total = max(part["width"] for part in parts), sum(part["height"] for part in parts)
    num_columns = min(int(PAGE_WIDTH // widest), round(total / SHORT_COLUMN))
    return {"parts": parts, "num_columns": max(1, num_columns), "width": widest}


def model_part(part: Mapping[int, ModelBox], shares: Shares, offset: float = 0.0) -> dict[str, Any]:
    """Return the boxes and wires of a part.

    Args:
        part: its boxes.
        shares: of the candidates.
        offset: from the middle, of the box where the part before ends.
    """
    lines = {number: _node_lines(box, shares) for number, box in part.items()}
    widths = {
        number: max(120.0, text_width(" ".join(filter(None, each[:2])), 13.5) + 26, text_width(each[2], 11.5) + 24)
        for number, each in lines.items()
    }
    edges = [(start, end) for end, box in part.items() for start in box.inputs]
    layout = arrange({**{start: 2.0 for start, _ in edges}, **widths}, edges, 16.0, 4.0)
    entry = min(part) - 1
    has_entry = entry in layout.row
    first_row = NODE_ROW - NODE_HEIGHT if has_entry else 2.0
    top = {node: first_row + (row - has_entry) * NODE_ROW for node, row in layout.row.items()}
    height = first_row + (layout.num_rows - has_entry) * NODE_ROW - (NODE_ROW - NODE_HEIGHT) + 2.0
    middle = layout.width / 2
    wires = []
    for (upper, _), (first, *lanes, last) in layout.chains.items():
        at = [(layout.x[lane], top[lane] + below) for lane in lanes for below in (0.0, NODE_HEIGHT)]
        begin = (middle + offset, 0.0) if upper == entry else (layout.x[first], top[first] + NODE_HEIGHT)
        wires.append(wire([begin, *at, (layout.x[last], top[last])], 6.0, 4.0))
    boxes = [
        {"x": layout.x[number], "y": top[number], "width": widths[number], "lines": lines[number],
         "kind": _node_kind(box, shares), "title": _node_title(box)}
        for number, box in part.items()
    ]  # fmt: skip
    size = {"width": layout.width, "height": height, "box_height": NODE_HEIGHT}
    return {"boxes": boxes, "wires": wires, "offset": layout.x[max(part)] - middle, **size}


def _node_lines(box: ModelBox, shares: Shares) -> tuple[str, str, str]:
    """Return what a box is, the mutator's name or the candidate's with its share, and a line below."""
    last = box.nodes[-1]
    if len(box.nodes) == 1:
        facts = [shortened_key(last.id, MAX_CHARACTERS), last.shape]
        known = [(value, *shares[name, value]) for name, value in last.stands_for if (name, value) in shares]
        said = shortened(last.mutator, 14)
        for value, share, is_found in known[:1]:
            said = f"{shortened(value, 14)} {'★ ' if is_found else ''}{100 * share:.0f}%"
        return shortened(last.kind, 20), said, " · ".join(filter(None, facts))
    changed = f", {box.num_changed} changed" if box.num_changed else ""
    kinds = Counter(each.kind for each in box.nodes if each.kind not in ("placeholder", "output"))
    some = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.most_common(3))
    return f"{len(box.nodes)} nodes{changed}", "", shortened(some, MAX_CHARACTERS)


def _node_kind(box: ModelBox, shares: Shares) -> str:
    is_found = len(box.nodes) == 1 and any(shares.get(one, (0, False))[1] for one in box.nodes[0].stands_for)
    return f"node{' changed' if box.num_changed else ''}{' found' if is_found else ''}"


def _node_title(box: ModelBox) -> str:
    """Return what a box says when it is pointed at."""
    first, last = box.nodes[0], box.nodes[-1]
    if len(box.nodes) == 1:
        candidates = [f"{value} of {name}" for name, value in first.stands_for]
        facts = (first.id, first.kind, first.shape, f"by {first.mutator}" if first.mutator else "", *candidates)
        return ", ".join(filter(None, facts))
    return f"{first.id} to {last.id}" + (f", {last.shape}" if last.shape else "")
