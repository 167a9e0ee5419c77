"""Graphs as SVG: the problems of a program, and the model of a problem."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

import networkx as nx
from markupsafe import Markup

from mlotool.report.formats import last_part, number, shortened, shortened_key, words
from mlotool.report.models import ModelBox, ModelRecord, Shares, alike, model_boxes
from mlotool.report.page import render
from mlotool.report.recorded_run import as_dict

Pair = tuple[Any, Any]

MARGIN, NUM_SWEEPS = 14.0, 8
# The first line of a box, and each of the others; what is above and below them.
NAME_SIZE, FACT_SIZE, LINE_HEIGHT, PADDING = 13.5, 11.5, 17.0, 12.0
MAX_CHARACTERS = 34
# Of decisions that are shown without being asked for.
MAX_ROWS = 40


@dataclass
class Arrangement:
    """Where the nodes of a graph go, row by row from the top, and what its edges pass on their way down.

    Args:
        x: center of each node.
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


def arrange(widths: Mapping[Any, float], edges: Sequence[Pair], gap: float, lane: float) -> Arrangement:
    """Lay a graph out in rows: a node stands above all that it leads to.

    A row is ordered by where the neighbors of its nodes are, as Sugiyama et al. (1981) do.

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
    return Arrangement(x, row, chains, max(x[node] + half[node] for node in x) + MARGIN)


@dataclass
class Box:
    """What a box of a picture says.

    Args:
        lines: the name, and facts below it.
        beside: what stands beside the name.
        css: its class.
        title: what it says when it is pointed at.
        colour: of its border, by name; empty for that of its class.
    """

    lines: Sequence[str]
    beside: str = ""
    css: str = "node"
    title: str = ""
    colour: str = ""
    width: float = field(init=False)

    def __post_init__(self) -> None:
        # No font to measure: a sans-serif letter is a little over half as wide as its size.
        name, *facts = (0.56 * len(text) for text in (f"{self.lines[0]} {self.beside}", *self.lines[1:]))
        self.width = max(120.0, NAME_SIZE * name + 26, *(FACT_SIZE * fact + 24 for fact in facts))


@dataclass
class Wire:
    """A wire of a picture.

    Args:
        upper: the box where it begins.
        lower: the box where it ends.
        title: what it says when it is pointed at.
        colour: its name.
        shift: to the right of the middle of what it passes.
        is_upwards: whether its arrow is at the upper box; it is dashed then.
    """

    upper: Hashable
    lower: Hashable
    title: str = ""
    colour: str = "muted"
    shift: float = 0.0
    is_upwards: bool = False


def picture(boxes: Mapping[Any, Box], wires: Sequence[Wire], gap: float, label: str) -> Markup:
    """Draw boxes in rows and the wires between them; the wires of a cycle are left out."""
    arrangement = arrange(
        {name: box.width for name, box in boxes.items()}, [(wire.upper, wire.lower) for wire in wires], gap, gap / 2
    )
    height = LINE_HEIGHT * max(len(box.lines) for box in boxes.values()) + PADDING
    top = {node: MARGIN + row * (height + 0.6 * gap + 16) for node, row in arrangement.row.items()}
    drawn = []
    for wire in wires:
        if (wire.upper, wire.lower) in arrangement.chains:
            first, *lanes, last = arrangement.chains[wire.upper, wire.lower]
            places = [(first, height), *((lane, below) for lane in lanes for below in (0.0, height)), (last, 0.0)]
            points = [(arrangement.x[node] + wire.shift, top[node] + below) for node, below in places]
            drawn.append({"wire": wire, **_path(points[::-1] if wire.is_upwards else points)})
    at = [{"box": box, "x": arrangement.x[name], "y": top[name]} for name, box in boxes.items()]
    size = {"width": arrangement.width, "height": max(top.values()) + height + MARGIN, "box_height": height}
    return render("graph.svg", boxes=at, wires=drawn, label=label, line_height=LINE_HEIGHT, **size)


def _path(points: Sequence[tuple[float, float]]) -> dict[str, str]:
    """Return an SVG path that leaves and reaches every row vertically, and its arrowhead."""
    *before, (x, y) = points
    neck = y + (7 if before[-1][1] > y else -7)
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise([*before, (x, neck)]):
        middle = (y0 + y1) / 2
        path += f" C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"
    return {"path": path, "tip": f"M{x:.1f},{y:.1f} L{x - 4.5:.1f},{neck:.1f} L{x + 4.5:.1f},{neck:.1f} z"}


def problem_graph(config: Mapping[str, Any], colours: Mapping[str, str]) -> Markup | None:
    """Draw the problems of a resolved config: solid wires shape, dashed ones carry a solution; None without any."""
    problems = {str(name): as_dict(value) for name, value in as_dict(config.get("problems")).items()}
    if not problems:
        return None
    graph = as_dict(config.get("graph"))
    shaping, reading = (
        [(start, end) for start, end in _edges(graph.get(key)) if {start, end} <= {*problems} and start != end]
        for key in ("upper_to_lower", "lower_to_upper")
    )
    wires = [Wire(upper, lower, f"{upper} shapes {lower}", colours[upper], -22.0) for upper, lower in shaping]
    for lower, upper in reading:
        title = f"{upper} reads the solution of {lower}"
        wires.append(Wire(upper, lower, title, colours[lower], 22.0, is_upwards=True))
    solved = {lower for lower, _ in reading}
    boxes = {}
    for name, problem in problems.items():
        lines = [*_problem_lines(name, problem), _hypergradient(problem, config) if name in solved else ""]
        boxes[name] = Box(lines, colour=colours[name])
    return picture(boxes, wires, 44.0, "Graph of the optimization problems")


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
    parts = (chosen.get("_target_"), as_dict(chosen.get("solver")).get("_target_"), chosen.get("product"))
    return shortened(" · ".join(words(last_part(part)) for part in parts if part), 48)


def model_section(record: ModelRecord, shares: Shares | None = None) -> Markup:
    """Return the graph and the decisions of a model as cards.

    Args:
        record: of the model.
        shares: of a shared space, what stands in the boxes of its candidates.
    """
    shares, rows = shares or {}, []
    for name, decision in alike(record.decisions):
        left = decision.num_candidates - len(decision.candidates)
        rows.append((name, decision.value, ", ".join(decision.candidates) + (f", and {left} more" if left > 0 else "")))
    num_changed = sum(bool(node.mutator) for node in record.nodes)
    graph = model_graph(model_boxes(record.nodes), shares, f"Graph of the model of {record.problem}")
    values = {"graph": graph, "rows": rows, "max_rows": MAX_ROWS, "num_changed": num_changed}
    return render("model.html", model=record, shares=shares, **values).strip()


def model_graph(boxes: Sequence[ModelBox], shares: Shares, label: str) -> Markup | None:
    """Draw the boxes of a model; None where there are none."""
    wires = [Wire(source, number) for number, box in enumerate(boxes) for source in box.inputs]
    return picture(dict(enumerate(_model_box(box, shares) for box in boxes)), wires, 16.0, label) if boxes else None


def _model_box(box: ModelBox, shares: Shares) -> Box:
    first, last = box.nodes[0], box.nodes[-1]
    css = "node changed" if box.num_changed else "node"
    if len(box.nodes) > 1:
        changed = f", {box.num_changed} changed" if box.num_changed else ""
        kinds = Counter(node.kind for node in box.nodes if node.kind not in ("placeholder", "output"))
        some = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.most_common(3))
        title = ", ".join(filter(None, (f"{first.id} to {last.id}", last.shape)))
        return Box([f"{len(box.nodes)} nodes{changed}", shortened(some, MAX_CHARACTERS)], css=css, title=title)
    known = [(value, *shares[name, value]) for name, value in last.stands_for if (name, value) in shares]
    beside = shortened(last.mutator, 14)
    for value, share, is_found in known[:1]:
        beside = f"{shortened(value, 14)} {'★ ' if is_found else ''}{100 * share:.0f}%"
    facts = " · ".join(filter(None, [shortened_key(last.id, MAX_CHARACTERS), last.shape]))
    by = [f"by {last.mutator}"] if last.mutator else []
    candidates = [f"{value} of {name}" for name, value in last.stands_for]
    title = ", ".join(filter(None, (last.id, last.kind, last.shape, *by, *candidates)))
    css += " found" if any(is_found for *_, is_found in known) else ""
    return Box([shortened(last.kind, 20), facts], beside, css, title)
