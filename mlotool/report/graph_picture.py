"""The graph of a program as inline SVG: boxes are problems, solid wires shape, dashed ones carry a solution."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from mlotool.report.formats import last_part, number, shortened, words
from mlotool.report.graph_layers import BOX_HEIGHT, TAB_HEIGHT, Box, Pair
from mlotool.report.graph_layout import Layout, Point, Wire, arrange
from mlotool.report.markup import Markup, element
from mlotool.report.palette import variable
from mlotool.report.run_folder import as_dict

ARROW = 8.0


def graph_picture(config: Mapping[str, Any], colours: Mapping[str, str]) -> Markup | None:
    """Draw the problems of a resolved config and their edges; None where it has no problems."""
    problems = {str(name): as_dict(value) for name, value in as_dict(config.get("problems")).items()}
    if not problems:
        return None
    graph = as_dict(config.get("graph"))
    shapes = [(a, b) for a, b in _edges(graph.get("upper_to_lower")) if {a, b} <= {*problems} and a != b]
    solutions = [(b, a) for a, b in _edges(graph.get("lower_to_upper")) if {a, b} <= {*problems} and a != b]
    lines = {name: _lines(name, problem) for name, problem in problems.items()}
    tabs = {lower: _hypergradient(problems[lower], config) for _, lower in solutions}
    tab_widths = {name: text_width(text, 11.5) + 22 for name, text in tabs.items()}
    widths = {
        name: max(170.0, text_width(text[0], 16) + 60, *(text_width(line, 12.5) + 44 for line in text[1:]))
        for name, text in lines.items()
    }
    # All of one width, so that the wires between a problem and the one below it run straight.
    width = max([*widths.values(), *(tab + 88 for tab in tab_widths.values())])
    layout = arrange(list(problems), shapes, solutions, dict.fromkeys(problems, width), tab_widths)
    drawn = [_wire(wire, colours) for wire in layout.wires]
    drawn += [_box(layout.boxes[name], lines[name], tabs.get(name), colours[name]) for name in problems]
    return _frame(layout, drawn)


def _frame(layout: Layout, drawn: list[Markup]) -> Markup:
    return element(
        "svg",
        *drawn,
        viewBox=f"0 0 {layout.width:.0f} {layout.height:.0f}",
        # Never larger than life, and on a phone never so small that it cannot be read: the frame scrolls.
        style=f"width:100%;max-width:{layout.width:.0f}px;min-width:{layout.width * 0.75:.0f}px",
        role="img",
        aria_label="Graph of the optimization problems",
    )


def _edges(edges: object) -> list[Pair]:
    pairs = []
    for start, ends in as_dict(edges).items():
        pairs += [(str(start), str(end)) for end in (ends if isinstance(ends, list) else [ends])]
    return list(dict.fromkeys(pairs))


def _lines(name: str, problem: Mapping[str, Any]) -> list[str]:
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


def text_width(text: str, size: float) -> float:
    """Return about how wide a text is, in pixels."""
    # No font to measure: a sans-serif letter is a little over half as wide as its size.
    return 0.56 * size * len(text)


def _box(box: Box, lines: list[str], tab: str | None, colour: str) -> Markup:
    paint = variable(colour)
    left, middle = box.x - box.width / 2, box.x
    parts = []
    if tab is not None:
        parts.append(
            element(
                "path",
                d=f"M{middle - box.tab / 2:.1f},{box.y:.1f} v{-TAB_HEIGHT + 6:.1f} q0,-6 6,-6 "
                f"h{box.tab - 12:.1f} q6,0 6,6 v{TAB_HEIGHT - 6:.1f} z",
                fill=paint,
            )
        )
        parts.append(centred_text(middle, box.y - 7, tab, "graph-tab"))
    parts.append(
        element(
            "rect",
            x=f"{left:.1f}",
            y=f"{box.y:.1f}",
            width=f"{box.width:.1f}",
            height=BOX_HEIGHT,
            rx=9,
            fill=variable("card"),
            stroke=paint,
            stroke_width=2,
        )
    )
    for line, height, style in zip(lines, (27, 47, 65), ("graph-name", "graph-fact", "graph-fact"), strict=True):
        parts.append(centred_text(middle, box.y + height, line, style))
    return element("g", *parts)


def centred_text(x: float, y: float, text: str, style: str) -> Markup:
    """Return a line of text around x."""
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_=style, text_anchor="middle")


def _wire(wire: Wire, colours: Mapping[str, str]) -> Markup:
    paint = variable(colours[wire.lower if wire.solution else wire.upper])
    *before, last = wire.points
    tip_up = before[-1][1] > last[1]
    neck = (last[0], last[1] + (ARROW if tip_up else -ARROW))
    title = f"{wire.upper} reads the solution of {wire.lower}" if wire.solution else f"{wire.upper} shapes {wire.lower}"
    return element(
        "g",
        element("title", title),
        element(
            "path",
            d=curve([*before, neck]),
            fill="none",
            stroke=paint,
            stroke_width=2,
            stroke_dasharray="6 5" if wire.solution else None,
        ),
        element(
            "path",
            d=f"M{last[0]:.1f},{last[1]:.1f} L{neck[0] - 5:.1f},{neck[1]:.1f} L{neck[0] + 5:.1f},{neck[1]:.1f} z",
            fill=paint,
        ),
    )


def curve(points: list[Point]) -> str:
    """Return an SVG path that leaves and reaches every layer vertically."""
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        path += f" C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"
    return path
