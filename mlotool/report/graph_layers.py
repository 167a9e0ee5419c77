"""Boxes in layers by level, the upper problems on top, with few crossings. Geometry only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Pair = tuple[str, str]

BOX_HEIGHT = 78.0
TAB_HEIGHT = 22.0
LAYER_GAP = 62.0
MARGIN = 14.0


@dataclass(frozen=True)
class Spacing:
    """The room between the boxes of a layer, and the width of a lane, in pixels."""

    gap: float
    lane: float


PROBLEMS = Spacing(44.0, 30.0)


@dataclass
class Box:
    """A problem, or (`is_lane`) the place where wires pass a layer.

    Args:
        name: the problem.
        layer: counted from the bottom.
        width: in pixels.
        tab: width of the tab on top from which its solution leaves.
        x: centre.
        y: top edge.
    """

    name: str
    layer: int
    width: float
    tab: float = 0.0
    x: float = 0.0
    y: float = 0.0
    is_lane: bool = False


@dataclass
class Grid:
    """The layers from the bottom up, and the boxes and lanes that each (upper, lower) pair passes, downwards."""

    layers: list[list[Box]]
    chains: dict[Pair, list[Box]] = field(default_factory=dict)
    _near: dict[tuple[int, int], list[Box]] = field(default_factory=dict)

    def add(self, pair: Pair, chain: list[Box]) -> None:
        """Join two boxes by the lanes between them."""
        self.chains[pair] = chain
        for high, low in pairwise(chain):
            self._near.setdefault((id(low), 1), []).append(high)
            self._near.setdefault((id(high), -1), []).append(low)

    def neighbours(self, box: Box, step: int) -> list[Box]:
        """Return what the wires of `box` lead to one layer above (step 1) or below it (step -1)."""
        return self._near.get((id(box), step), [])


def layered(
    names: Sequence[str],
    pairs: Sequence[Pair],
    widths: Mapping[str, float],
    tabs: Mapping[str, float],
    spacing: Spacing = PROBLEMS,
) -> Grid:
    """Return the boxes of all problems in their places; the layers hold lanes for the wires that pass them."""
    levels = _levels(names, pairs)
    boxes = {name: Box(name, levels[name], widths[name], tabs.get(name, 0.0)) for name in names}
    grid = Grid([[] for _ in range(max(levels.values(), default=-1) + 1)])
    for box in boxes.values():
        grid.layers[box.layer].append(box)
    for upper, lower in pairs:
        # An edge that does not go down belongs to a graph that validation refuses; the page shows the rest.
        if levels[upper] > levels[lower]:
            grid.add((upper, lower), _chain(grid, boxes[upper], boxes[lower], spacing.lane))
    _order(grid)
    _place(grid, spacing.gap)
    _stack(grid)
    return grid


def _levels(names: Sequence[str], pairs: Sequence[Pair]) -> dict[str, int]:
    levels = dict.fromkeys(names, 0)
    for _ in names:
        for upper, lower in pairs:
            # Capped, so that a cycle ends too.
            levels[upper] = min(max(levels[upper], levels[lower] + 1), len(names) - 1)
    ranks = {level: rank for rank, level in enumerate(sorted(set(levels.values())))}
    return {name: ranks[level] for name, level in levels.items()}


def _chain(grid: Grid, upper: Box, lower: Box, width: float) -> list[Box]:
    lanes = []
    for layer in range(upper.layer - 1, lower.layer, -1):
        lane = Box(f"{upper.name}/{lower.name}", layer, width, is_lane=True)
        grid.layers[layer].append(lane)
        lanes.append(lane)
    return [upper, *lanes, lower]


def _order(grid: Grid) -> None:
    """Order each layer so that few wires cross: the barycentre rule, the best of some sweeps."""
    best, fewest = [list(layer) for layer in grid.layers], _num_crossings(grid)
    for sweep in range(8):
        step = -1 if sweep % 2 else 1
        for layer in grid.layers[::step]:
            place = {id(box): _middle_rank(grid, box, step) for box in layer}
            layer.sort(key=lambda box, place=place: place[id(box)])  # type: ignore[misc]
        crossings = _num_crossings(grid)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in grid.layers], crossings
    grid.layers = best


def _rank(grid: Grid, box: Box) -> float:
    # Relative to the layer's middle, so that layers of different sizes compare.
    layer = grid.layers[box.layer]
    return next(i for i, other in enumerate(layer) if other is box) - (len(layer) - 1) / 2


def _middle_rank(grid: Grid, box: Box, step: int) -> float:
    ranks = [_rank(grid, other) for other in grid.neighbours(box, -step)]
    return sum(ranks) / len(ranks) if ranks else _rank(grid, box)


def _num_crossings(grid: Grid) -> int:
    spots: dict[int, list[tuple[float, float]]] = {}
    for chain in grid.chains.values():
        for high, low in pairwise(chain):
            spots.setdefault(high.layer, []).append((_rank(grid, high), _rank(grid, low)))
    return sum(
        (a - c) * (b - d) < 0 for layer in spots.values() for i, (a, b) in enumerate(layer) for c, d in layer[i + 1 :]
    )


def _place(grid: Grid, gap: float) -> None:
    """Give every box its x: near the mean of its neighbours, without overlaps, in the layer's order."""
    for layer in grid.layers:
        _spread(layer, [0.0] * len(layer), gap)
    for sweep in range(12):
        step = -1 if sweep % 2 else 1
        for layer in grid.layers[::step]:
            wanted = []
            for box in layer:
                near = grid.neighbours(box, -step) or grid.neighbours(box, step)
                wanted.append(sum(other.x for other in near) / len(near) if near else box.x)
            _spread(layer, wanted, gap)
    left = min((box.x - box.width / 2 for layer in grid.layers for box in layer), default=0.0)
    for layer in grid.layers:
        for box in layer:
            box.x += MARGIN - left


def _spread(layer: list[Box], wanted: list[float], gap: float) -> None:
    right = float("-inf")
    for box, x in zip(layer, wanted, strict=True):
        box.x = max(x, right + box.width / 2)
        right = box.x + box.width / 2 + gap
    excess = sum(box.x - x for box, x in zip(layer, wanted, strict=True)) / max(1, len(layer))
    for box in layer:
        box.x -= excess


def _stack(grid: Grid) -> None:
    y = MARGIN
    for layer in grid.layers[::-1]:
        y += TAB_HEIGHT if any(box.tab for box in layer) else 0.0
        for box in layer:
            box.y = y
        y += BOX_HEIGHT + LAYER_GAP
