"""Where the boxes and wires of a program's graph go. Geometry only.

A lower problem's solution leaves from one tab on top of its box, however many read it; what shapes the problem arrives
beside that tab, on the side it comes from. So no two wires of neighbouring layers cross without need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlotool.report.graph_layers import BOX_HEIGHT, MARGIN, TAB_HEIGHT, Box, Grid, Pair, layered

Point = tuple[float, float]
PORT_GAP = 26.0


@dataclass(frozen=True)
class Wire:
    """An edge of the graph, as the points it passes from its start to its end.

    Args:
        upper, lower: the problems that it joins.
        solution: whether it carries a solution up; else it shapes downwards.
        points: from start to end; between the second and third, fourth and fifth, ... it runs straight through a layer.
    """

    upper: str
    lower: str
    solution: bool
    points: tuple[Point, ...]


@dataclass
class Layout:
    """Boxes and wires, and the size of the whole drawing in pixels."""

    boxes: dict[str, Box]
    wires: list[Wire]
    width: float
    height: float


def arrange(
    names: Sequence[str],
    shapes: Sequence[Pair],
    solutions: Sequence[Pair],
    widths: Mapping[str, float],
    tabs: Mapping[str, float],
) -> Layout:
    """Lay the graph out.

    Args:
        names: the problems, in the recipe's order.
        shapes: (upper, lower) of every upper_to_lower edge.
        solutions: (upper, lower) of every lower_to_upper edge.
        widths: of the boxes.
        tabs: of the tabs of those boxes that have one.
    """
    pairs = [pair for pair in dict.fromkeys((*shapes, *solutions)) if {*pair} <= {*names}]
    grid = layered(names, pairs, widths, tabs)
    everything = [box for layer in grid.layers for box in layer]
    return Layout(
        {box.name: box for box in everything if not box.is_lane},
        _wires(grid, set(shapes), set(solutions)),
        max((box.x + box.width / 2 for box in everything), default=0.0) + MARGIN,
        max((box.y + BOX_HEIGHT for box in everything), default=0.0) + MARGIN,
    )


def _wires(grid: Grid, shapes: set[Pair], solutions: set[Pair]) -> list[Wire]:
    tops = _top_ports(grid, shapes)
    bottoms = _bottom_ports(grid, shapes, solutions, tops)
    wires = []
    for (pair, is_solution), bottom in bottoms.items():
        chain = grid.chains[pair]
        lower = chain[-1]
        points = [bottom]
        for lane in chain[1:-1]:
            side = _side(chain) if is_solution else -_side(chain)
            x = lane.x + side * PORT_GAP / 3
            points += [(x, lane.y - TAB_HEIGHT), (x, lane.y + BOX_HEIGHT)]
        points.append(_tab(lower) if is_solution else tops[pair])
        wires.append(Wire(*pair, is_solution, tuple(points[::-1] if is_solution else points)))
    return wires


def _tab(box: Box) -> Point:
    return box.x, box.y - (TAB_HEIGHT if box.tab else 0.0)


def _side(chain: Sequence[Box]) -> int:
    """Return on which side of its shaping wire a pair's solution runs: 1 right, if the upper stands left or above."""
    return 1 if chain[-2].x <= chain[-1].x + 1 else -1


def _top_ports(grid: Grid, shapes: set[Pair]) -> dict[Pair, Point]:
    """Return where what shapes a problem arrives: beside the tab, the nearest comer nearest to it."""
    ports: dict[Pair, Point] = {}
    for name in {lower for _, lower in grid.chains}:
        pairs = [pair for pair in grid.chains if pair[1] == name and pair in shapes]
        for side in (1, -1):
            here = sorted(
                (pair for pair in pairs if _side(grid.chains[pair]) == side),
                key=lambda pair: abs(grid.chains[pair][-2].x - grid.chains[pair][-1].x),
            )
            for index, pair in enumerate(here):
                box = grid.chains[pair][-1]
                room = box.width / 2 - box.tab / 2 - 10
                gap = min(PORT_GAP, room / max(1, len(here)))
                ports[pair] = (box.x - side * (box.tab / 2 + gap * (index + (0.75 if box.tab else 0.5))), box.y)
    return ports


def _bottom_ports(
    grid: Grid, shapes: set[Pair], solutions: set[Pair], tops: Mapping[Pair, Point]
) -> dict[tuple[Pair, bool], Point]:
    """Return where wires meet the lower side of an upper box: straight above their other end where they can."""
    ports: dict[tuple[Pair, bool], Point] = {}
    for name in {upper for upper, _ in grid.chains}:
        pairs = sorted((pair for pair in grid.chains if pair[0] == name), key=lambda pair: grid.chains[pair][1].x)
        ends: list[tuple[tuple[Pair, bool], float]] = []
        for pair in pairs:
            chain = grid.chains[pair]
            kinds = [kind for kind in (False, True)[:: _side(chain)] if pair in (solutions if kind else shapes)]
            for kind in kinds:
                below = tops[pair] if not kind else _tab(chain[-1])
                ends.append(((pair, kind), chain[1].x if len(chain) > 2 else below[0]))
        box = grid.chains[pairs[0]][0]
        for (key, _), x in zip(ends, _apart(box, [x for _, x in ends]), strict=True):
            ports[key] = (x, box.y + BOX_HEIGHT)
    return ports


def _apart(box: Box, wanted: Sequence[float]) -> list[float]:
    """Return the wanted positions, held inside the box and apart, in their order."""
    half = box.width / 2 - 20
    gap = min(PORT_GAP, 2 * half / max(1, len(wanted) - 1))
    left, right = box.x - half, box.x + half
    places: list[float] = []
    for index, x in enumerate(wanted):
        low = places[-1] + gap if places else left
        high = right - gap * (len(wanted) - 1 - index)
        places.append(min(max(x, low), high))
    return places
