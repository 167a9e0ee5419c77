"""Where the boxes and wires of a model's graph go: from top to bottom, in columns. Geometry only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlotool.report.graph_layers import Box, Grid, Spacing, layered
from mlotool.report.graph_layout import Point
from mlotool.report.model_blocks import ModelPart

HEIGHT, ROW_GAP, COLUMN_GAP, MARGIN = 46.0, 26.0, 44.0, 14.0
PAGE_WIDTH = 1040.0
"""Of the page's inside on a screen."""

SHORT_COLUMN = 620.0
"""A column is not broken before it is so long."""

_ENTRY = "entry"


@dataclass
class PlacedBox:
    """A box: its centre, and its upper edge."""

    x: float
    y: float
    width: float


@dataclass
class ModelLayout:
    """Boxes by number, wires by what they join and the points that they pass, and the size of the drawing."""

    boxes: dict[int, PlacedBox] = field(default_factory=dict)
    wires: list[tuple[int, int, tuple[Point, ...]]] = field(default_factory=list)
    jumps: list[tuple[Point, ...]] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0


@dataclass(frozen=True)
class _Block:
    """A part in rows: the grid of its boxes, which has the entry's lane on top where it has one."""

    part: ModelPart
    grid: Grid
    left: float
    width: float

    @property
    def num_rows(self) -> int:
        return len(self.grid.layers) - (self.part.entry is not None)

    @property
    def height(self) -> float:
        return self.num_rows * (HEIGHT + ROW_GAP)


def arrange_model(parts: Sequence[ModelPart], widths: Mapping[int, float]) -> ModelLayout:
    """Lay the parts of a model out, each below the one before, in as many columns as the page has room for.

    Args:
        parts: of the model.
        widths: of the boxes, by number.
    """
    layout = ModelLayout()
    blocks = [_block(part, widths) for part in parts]
    widest, total = max(each.width for each in blocks), sum(each.height for each in blocks)
    num_columns = max(1, int((PAGE_WIDTH + COLUMN_GAP) // (widest + COLUMN_GAP)))
    left, bottom = MARGIN, 0.0
    for place, column in enumerate(_columns(blocks, max(SHORT_COLUMN, total / num_columns), num_columns)):
        middle = left + max(each.width for each in column) / 2
        top = MARGIN + (ROW_GAP if place else 0.0)
        for index, block in enumerate(column):
            begin = None
            if block.part.entry is not None:
                before = layout.boxes[block.part.entry]
                begin = before.x, before.y + HEIGHT
                if index == 0:
                    begin = _jump(layout, begin, left - COLUMN_GAP / 2, (middle, top - ROW_GAP))
            _place(layout, block, middle, top, begin)
            top += block.height
        bottom, left = max(bottom, top), 2 * middle - left + COLUMN_GAP
    layout.width, layout.height = left - COLUMN_GAP + MARGIN, bottom - ROW_GAP + MARGIN
    return layout


def _columns(blocks: Sequence[_Block], target: float, most: int) -> list[list[_Block]]:
    columns: list[list[_Block]] = [[]]
    height = 0.0
    for block in blocks:
        if columns[-1] and height + block.height / 2 > target and len(columns) < most:
            columns.append([])
            height = 0.0
        columns[-1].append(block)
        height += block.height
    return columns


def _block(part: ModelPart, widths: Mapping[int, float]) -> _Block:
    own = {str(number): widths[number] for number in part.boxes}
    names, every = list(own), own
    if part.entry is not None:
        names, every = [_ENTRY, *names], {_ENTRY: 2.0, **own}
    pairs = [
        (_ENTRY if each == part.entry else str(each), str(number))
        for number, box in part.boxes.items()
        for each in box.inputs
    ]
    grid = layered(names, pairs, every, {}, Spacing(16.0, 4.0))
    boxes = [box for layer in grid.layers for box in layer]
    left = min(box.x - box.width / 2 for box in boxes)
    return _Block(part, grid, left, max(box.x + box.width / 2 for box in boxes) - left)


def _place(layout: ModelLayout, block: _Block, middle: float, top: float, begin: Point | None) -> None:
    """Put a block below `top`, around `middle`, with its wires; those from outside come from `begin`."""
    part, grid = block.part, block.grid
    shift, last = middle - block.width / 2 - block.left, block.num_rows - 1

    def point(box: Box) -> Point:
        return box.x + shift, top + (last - box.layer) * (HEIGHT + ROW_GAP)

    for box in (box for layer in grid.layers for box in layer if not box.is_lane and box.name != _ENTRY):
        layout.boxes[int(box.name)] = PlacedBox(*point(box), box.width)
    for (upper, lower), chain in grid.chains.items():
        start = part.entry if upper == _ENTRY else int(upper)
        assert start is not None
        lanes = [point(box) for box in chain[1:-1]]
        passed = [end for x, y in lanes for end in ((x, y), (x, y + HEIGHT))]
        x, y = point(chain[0])
        first = begin if upper == _ENTRY and begin is not None else (x, y + HEIGHT)
        layout.wires.append((start, int(lower), (first, *passed, point(chain[-1]))))


def _jump(layout: ModelLayout, foot: Point, between: float, head: Point) -> Point:
    """Lead a wire from the foot of a column to the head of the next one; return where it arrives."""
    low = foot[1] + ROW_GAP / 3
    layout.jumps.append((foot, (foot[0], low), (between, low), (between, head[1]), head))
    return head
