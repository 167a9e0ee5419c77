"""A network of cells, on whose edges mutators of a space put operations."""

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from mlotool.core.settings import Count, Layers, Shape, target
from mlotool.models.cell_operations import HalvingConvolution, operation, pointwise

# b: batch, c: channels, h, w: height and width, k: classes

KINDS = ("normal", "reduction")
"""The two kinds of cells."""


@target("module")
class CellNetwork(nn.Module):
    """A network of cells in which each node reads all nodes before it: the base of the DARTS space.

        node_j = sum over i < j of operation_ij(node_i),   cell = all nodes but its two inputs, side by side

    Two cells, a third and two thirds of the way, are reduction cells, which halve the image and double the width. The
    edges of a cell are its modules `normal.0`, `normal.1`, .. or `reduction.0`, .., ordered by the node that they
    enter, then by the node that they leave. A skip connection stands on each. The paper's auxiliary head and drop-path
    are left out.

    Args:
        image_shape: (c, h, w); only c matters.
        num_classes: k.
        width: channels of a node in the first cell.
        num_cells: at least 3 for cells of both kinds.
        num_nodes: intermediate nodes of a cell; 4 make a cell of 7 nodes with 14 edges.
        stem_multiplier: channels of the first convolution, in widths.
        affine: whether BatchNorm in cells has a scale and a shift; not in a search, where they would make up for what
            the architecture weighs.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), sections 3.1.1 (8 cells of width 16) and 3.1.2 (20 of width 36).

    Example:
        >>> CellNetwork([1, 8, 8], 10, width=2, num_nodes=1)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        image_shape: Shape,
        num_classes: Count,
        width: Count = 16,
        num_cells: Layers = 8,
        num_nodes: Layers = 4,
        stem_multiplier: Count = 3,
        affine: bool = True,
    ) -> None:
        super().__init__()
        stem_width = stem_multiplier * width
        convolution = nn.Conv2d(image_shape[0], stem_width, 3, padding=1, bias=False)
        self.stem = nn.Sequential(convolution, nn.BatchNorm2d(stem_width))
        self.cells = nn.ModuleList()
        num_outputs, follows_reduction = (stem_width, stem_width), False
        for number in range(num_cells):
            is_reduction = number in (num_cells // 3, 2 * num_cells // 3)
            width *= 2 if is_reduction else 1
            shape = _CellShape(num_outputs, width, KINDS[is_reduction], follows_reduction, affine)
            self.cells.append(_Cell(shape, num_nodes))
            num_outputs, follows_reduction = (num_outputs[1], num_nodes * width), is_reduction
        self.classifier = nn.Linear(num_outputs[1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, k) of images (b, c, h, w)."""
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return self.classifier(last.mean(dim=(2, 3)))


@dataclass(frozen=True)
class _CellShape:
    """Channels of the two cells before, channels of a node, kind of this cell, and whether the last cell halved."""

    num_inputs: tuple[int, int]
    width: int
    kind: str
    follows_reduction: bool
    affine: bool

    def inputs(self) -> nn.ModuleList:
        """Build what brings both inputs to this cell's width and size."""
        build = HalvingConvolution if self.follows_reduction else pointwise
        first: nn.Module = build(self.num_inputs[0], self.width, affine=self.affine)
        return nn.ModuleList([first, pointwise(self.num_inputs[1], self.width, affine=self.affine)])

    def edge(self, source: int) -> nn.Module:
        """Build the skip connection of an edge from the node `source`."""
        stride = 2 if self.kind == "reduction" and source < 2 else 1
        return operation("skip_connect", self.width, stride, affine=self.affine)


class _Cell(nn.Module):
    def __init__(self, shape: _CellShape, num_nodes: int) -> None:
        super().__init__()
        self.num_nodes, self.kind = num_nodes, shape.kind
        self.inputs = shape.inputs()
        edges = (shape.edge(source) for node in range(num_nodes) for source in range(2 + node))
        self.add_module(shape.kind, nn.ModuleList(edges))

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        nodes = [self.inputs[0](before), self.inputs[1](last)]
        edges = iter(self.get_submodule(self.kind).children())
        for _ in range(self.num_nodes):
            nodes.append(reduce(torch.add, [next(edges)(node) for node in nodes]))
        return torch.cat(nodes[2:], dim=1)
