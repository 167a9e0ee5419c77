"""Graphs as SVG: the problems of a program, and the model of a problem."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
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
    """

    x: dict[Hashable, float]
    row: dict[Hashable, int]
    chains: dict[Pair, list[Hashable]]
    width: float

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return 1 + max(self.row.values())


def arrange(widths: Mapping[Any, float], edges: Sequence[Pair], gap: float, lane: float) -> Layout:
    """Lay a graph out in rows: a node stands above all that it leads to.

    A row is ordered by where the neighbours of its nodes are, as Sugiyama et al. (1981) do.

    Args:
        widths: of the nodes.
        edges: from an upper to a lower node.
        gap: between the nodes of a row.
        lane: width of the place that an edge takes beside the nodes of a row.
    """
    graph = nx.DiGraph(edges)
    graph.add_nodes_from(widths)
    # A cycle belongs to a graph that validation refuses; the page shows the rest.
    while not nx.is_directed_acyclic_graph(graph):
        graph.remove_edge(*nx.find_cycle(graph)[-1][:2])
    layers: list[list[Hashable]] = [list(layer) for layer in nx.topological_generations(graph.reverse())][::-1]
    row = {node: number for number, layer in enumerate(layers) for node in layer}
    chains, links = {}, nx.Graph()
    links.add_nodes_from(widths)
    for upper, lower in graph.edges:
        lanes: list[Hashable] = [(upper, lower, place) for place in range(row[upper] + 1, row[lower])]
        for place, node in enumerate(lanes, row[upper] + 1):
            layers[place].append(node)
            row[node] = place
        chains[upper, lower] = [upper, *lanes, lower]
        nx.add_path(links, chains[upper, lower])
    half = {node: widths.get(node, lane) / 2 for node in row}
    x = dict.fromkeys(row, 0.0)
    for sweep in range(NUM_SWEEPS):
        for layer in layers[:: -1 if sweep % 2 else 1]:
            wanted = {node: fmean([x[other] for other in links[node]] or [x[node]]) for node in layer}
            layer.sort(key=wanted.__getitem__)
            right = float("-inf")
            for node in layer:
                x[node] = max(wanted[node], right + half[node])
                right = x[node] + half[node] + gap
            excess = fmean(x[node] - wanted[node] for node in layer)
            x |= {node: x[node] - excess for node in layer}
    left = min(x[node] - half[node] for node in x) - MARGIN
    x = {node: place - left for node, place in x.items()}
    return Layout(x, row, chains, max(x[node] + half[node] for node in x) + MARGIN)


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
    texts = [text_width(text, 16 - 3.5 * bool(place)) for box in lines.values() for place, text in enumerate(box)]
    width = max(170.0, max(texts) + 50, *(tab + 88 for tab in tab_widths.values()))
    layout = arrange(dict.fromkeys(problems, width), list(dict.fromkeys([*shapes, *solutions])), 44.0, 30.0)
    top = {node: MARGIN + row * ROW_HEIGHT for node, row in layout.row.items()}
    wires = []
    # On each side of a lower problem the nearest one arrives next to its tab.
    arrived: Counter[tuple[Any, bool]] = Counter()
    shapes.sort(key=lambda pair: abs(layout.x[pair[0]] - layout.x[pair[1]]))
    for (upper, lower), is_solution in [*((pair, False) for pair in shapes), *((pair, True) for pair in solutions)]:
        if (upper, lower) not in layout.chains:
            continue
        _, *lanes, _ = layout.chains[upper, lower]
        is_right = layout.x[layout.chains[upper, lower][-2]] > layout.x[lower]
        beside = 0.0
        if not is_solution:
            nearest = tab_widths.get(lower, -44.0) / 2 + 22 + 16 * arrived[lower, is_right]
            beside = (1 if is_right else -1) * min(nearest, width / 2 - 12)
            arrived[lower, is_right] += 1
        # At the upper problem the wires are in the order in which they arrive below.
        room, ahead = width / 2 - 18, layout.x[layout.chains[upper, lower][1]] - layout.x[upper]
        foot = layout.x[upper] + min(max(0.4 * ahead, 60 - room), room - 60) + min(max(beside, -60), 60)
        points = [(foot, top[upper] + BOX_HEIGHT)]
        for lane in lanes:
            at = layout.x[lane] + (6 if is_solution else -6)
            points += [(at, top[lane]), (at, top[lane] + BOX_HEIGHT)]
        points.append((layout.x[lower] + beside, top[lower] - TAB_HEIGHT * is_solution))
        drawn = wire(points[::-1] if is_solution else points, 8.0, 5.0)
        title = f"{upper} {'reads the solution of' if is_solution else 'shapes'} {lower}"
        colour = colours[lower if is_solution else upper]
        wires.append({**drawn, "title": title, "colour": colour, "is_solution": is_solution})
    boxes = [
        {"x": layout.x[name], "y": top[name], "lines": lines[name], "tab": tabs.get(name),
         "tab_width": tab_widths.get(name), "colour": colours[name]}
        for name in problems
    ]  # fmt: skip
    height = layout.num_rows * ROW_HEIGHT - (ROW_HEIGHT - BOX_HEIGHT) + 2 * MARGIN
    return render("problems.svg", wires=wires, boxes=boxes, box_width=width, width=layout.width, height=height)


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
    shares = shares or {}
    rows: list[tuple[str, str, str]] = []
    parts: list[dict[str, Any]] = []
    graph: dict[str, Any] | None = None
    for name, decision in alike(record.decisions):
        left = decision.num_candidates - len(decision.candidates)
        rows.append((name, decision.value, ", ".join(decision.candidates) + (f", and {left} more" if left > 0 else "")))
    for part in model_parts(record.nodes):
        parts.append(model_part(part, shares, parts[-1]["offset"] if parts else 0.0))
    if parts:
        widest, total = max(part["width"] for part in parts), sum(part["height"] for part in parts)
        num_columns = max(1, min(int(PAGE_WIDTH // widest), round(total / SHORT_COLUMN)))
        graph = {"parts": parts, "num_columns": num_columns, "width": widest}
    changed = sum(bool(node.mutator) for node in record.nodes)
    values = {"graph": graph, "shares": shares, "max_rows": MAX_ROWS}
    return render("model.html", model=record, rows=rows, num_changed=changed, **values).strip()


def model_part(part: Mapping[int, ModelBox], shares: Shares, offset: float = 0.0) -> dict[str, Any]:
    """Return the boxes and wires of a part.

    Args:
        part: its boxes.
        shares: of the candidates.
        offset: from the middle, of the box where the part before ends.
    """
    boxes = {number: _node_box(box, shares) for number, box in part.items()}
    edges = [(start, end) for end, box in part.items() for start in box.inputs]
    widths = {number: box["width"] for number, box in boxes.items()}
    layout = arrange({**{start: 2.0 for start, _ in edges}, **widths}, edges, 16.0, 4.0)
    entry = min(part) - 1
    has_entry = entry in layout.row
    first_row = NODE_ROW - NODE_HEIGHT if has_entry else 2.0
    top = {node: first_row + (row - has_entry) * NODE_ROW for node, row in layout.row.items()}
    middle = layout.width / 2
    wires = []
    for (upper, _), (first, *lanes, last) in layout.chains.items():
        at = [(layout.x[lane], top[lane] + below) for lane in lanes for below in (0.0, NODE_HEIGHT)]
        begin = (middle + offset, 0.0) if upper == entry else (layout.x[first], top[first] + NODE_HEIGHT)
        wires.append(wire([begin, *at, (layout.x[last], top[last])], 6.0, 4.0))
    return {
        "boxes": [{**box, "x": layout.x[number], "y": top[number]} for number, box in boxes.items()],
        "wires": wires,
        "offset": layout.x[max(part)] - middle,
        "width": layout.width,
        "height": max(top.values()) + NODE_HEIGHT + 2.0,
        "box_height": NODE_HEIGHT,
    }


def _node_box(box: ModelBox, shares: Shares) -> dict[str, Any]:
    """Return what a box says, its width and its CSS class."""
    first, last = box.nodes[0], box.nodes[-1]
    if len(box.nodes) > 1:
        changed = f", {box.num_changed} changed" if box.num_changed else ""
        kinds = Counter(node.kind for node in box.nodes if node.kind not in ("placeholder", "output"))
        some = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.most_common(3))
        lines = f"{len(box.nodes)} nodes{changed}", "", shortened(some, MAX_CHARACTERS)
        title, is_best = ", ".join(filter(None, (f"{first.id} to {last.id}", last.shape))), False
    else:
        known = [(value, *shares[name, value]) for name, value in last.stands_for if (name, value) in shares]
        is_best = any(is_found for *_, is_found in known)
        beside = shortened(last.mutator, 14)
        for value, share, is_found in known[:1]:
            beside = f"{shortened(value, 14)} {'★ ' if is_found else ''}{100 * share:.0f}%"
        facts = " · ".join(filter(None, [shortened_key(last.id, MAX_CHARACTERS), last.shape]))
        lines = shortened(last.kind, 20), beside, facts
        by = [f"by {last.mutator}"] if last.mutator else []
        candidates = [f"{value} of {name}" for name, value in last.stands_for]
        title = ", ".join(filter(None, (last.id, last.kind, last.shape, *by, *candidates)))
    head = text_width(" ".join(filter(None, lines[:2])), 13.5) + 26
    kind = f"node{' changed' if box.num_changed else ''}{' found' if is_best else ''}"
    return {"lines": lines, "kind": kind, "title": title, "width": max(120.0, head, text_width(lines[2], 11.5) + 24)}
