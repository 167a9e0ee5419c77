"""Networks of DARTS cells: the one that is searched in, and the one that a genotype describes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.models.cell_operations import OPERATIONS, HalvingConvolution, operation, pointwise
from mlotool.models.genotype import (
    KINDS,
    Edge,
    as_text,
    checked_genotype,
    num_edges,
    random_edges,
    strongest_edges,
)

# b: batch, c: channels, h, w: height and width, k: classes, e: edges of a cell


class CellArchitecture(nn.Module):
    """The architecture's logits: how much of each operation there is on each edge of a cell.

    Args:
        num_nodes: intermediate nodes of a cell; 4 make a cell of 7 nodes with 14 edges.
        scale: standard deviation of the logits at the start.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), section 2.2, and the published code (scale 1e-3).
    """

    def __init__(self, num_nodes: int = 4, scale: float = 1e-3) -> None:
        super().__init__()
        shape = (num_edges(num_nodes), len(OPERATIONS))
        self.normal = nn.Parameter(scale * torch.randn(shape))
        self.reduction = nn.Parameter(scale * torch.randn(shape))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the logits (e, 8) of normal and of reduction cells."""
        return self.normal, self.reduction

    def genotype(self) -> str:
        """Return the architecture that is derived from the logits, as text; see `strongest_edges`."""
        return as_text({kind: strongest_edges(logits) for kind, logits in zip(KINDS, self(), strict=True)})


class SearchNetwork(nn.Module):
    """A network in which each edge of a cell is a mixture of all operations; the architecture comes as an argument.

        edge(x) = sum_o softmax(logits)_o o(x),   node_j = sum over i < j of edge_ij(node_i)

    Two cells, a third and two thirds of the way, are reduction cells, which halve the image and double the width. All
    cells of a kind share their logits. BatchNorm has no scale and shift, which would make up for what the
    architecture weighs.

    Args:
        image_shape: (c, h, w); only c matters.
        num_classes: k.
        width: channels of a node in the first cell.
        num_cells: at least 3 for cells of both kinds.
        num_nodes: intermediate nodes of a cell.
        stem_multiplier: channels of the first convolution, in widths.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), equation 2 and section 3.1.1: 8 cells of width 16.

    Example:
        >>> network = SearchNetwork([1, 8, 8], 10, width=2, num_cells=3, num_nodes=1)
        >>> network(torch.zeros(2, 1, 8, 8), *CellArchitecture(num_nodes=1)()).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        width: int = 16,
        num_cells: int = 8,
        num_nodes: int = 4,
        stem_multiplier: int = 3,
    ) -> None:
        super().__init__()
        self.stack = _CellStack(
            image_shape, num_classes, width, num_cells, stem_multiplier, lambda shape: _MixedCell(shape, num_nodes)
        )
        # Like BatchNorm's statistics: what the weights were trained with last, for those who have no logits to give.
        for kind in KINDS:
            self.register_buffer(f"last_{kind}", torch.zeros(num_edges(num_nodes), len(OPERATIONS)))

    def forward(self, images: Tensor, normal: Tensor | None = None, reduction: Tensor | None = None) -> Tensor:
        """Return logits (b, k) of images (b, c, h, w).

        Args:
            images: (b, c, h, w).
            normal: (e, 8), the architecture of normal cells; None: the last one in training.
            reduction: (e, 8), of reduction cells.
        """
        if normal is None or reduction is None:
            normal, reduction = self.get_buffer("last_normal"), self.get_buffer("last_reduction")
        elif self.training:
            self.get_buffer("last_normal").copy_(normal.detach())
            self.get_buffer("last_reduction").copy_(reduction.detach())
        weights = {kind: (torch.softmax(each, 1),) for kind, each in zip(KINDS, (normal, reduction), strict=True)}
        return self.stack(images, weights)


class CellNetwork(nn.Module):
    """The network that a genotype describes, to be trained from scratch.

    As `SearchNetwork`, with two edges a node, one operation an edge, and a scale and shift in each BatchNorm. The
    paper's auxiliary head and drop-path are left out.

    Args:
        image_shape: (c, h, w); only c matters.
        num_classes: k.
        genotype: `{normal: [[operation, node], ...], reduction: [...]}`, as a search writes it to its artifacts; or
            `random`: drawn by the seed of the run.
        width: channels of a node in the first cell.
        num_cells: at least 3 for cells of both kinds.
        num_nodes: of a random genotype.
        stem_multiplier: channels of the first convolution, in widths.

    Raises:
        ConfigError: the genotype is none.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), section 3.1.2: 20 cells of width 36.

    Example:
        >>> cell = [["sep_conv_3x3", 0], ["skip_connect", 1]]
        >>> CellNetwork([1, 8, 8], 10, {"normal": cell, "reduction": cell}, width=2)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        genotype: Mapping[str, Sequence[Sequence[Any]]] | str = "random",
        width: int = 16,
        num_cells: int = 3,
        num_nodes: int = 4,
        stem_multiplier: int = 3,
    ) -> None:
        super().__init__()
        if isinstance(genotype, str) and genotype != "random":
            raise ConfigError(f"genotype: found the text {genotype!r}; expected `random`, or a mapping of both cells.")
        found = {kind: random_edges(num_nodes) for kind in KINDS} if isinstance(genotype, str) else genotype
        self.genotype = checked_genotype(found)
        self.stack = _CellStack(
            image_shape,
            num_classes,
            width,
            num_cells,
            stem_multiplier,
            lambda shape: _FixedCell(shape, self.genotype[shape.kind]),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, k) of images (b, c, h, w)."""
        return self.stack(images, dict.fromkeys(KINDS, ()))


@dataclass(frozen=True)
class _CellShape:
    """Channels of the two cells before, channels of a node, kind of this cell, and whether the last cell halved."""

    num_inputs: tuple[int, int]
    width: int
    kind: str
    follows_reduction: bool

    def inputs(self, *, affine: bool) -> nn.ModuleList:
        """Build what brings both inputs to this cell's width and size."""
        build = HalvingConvolution if self.follows_reduction else pointwise
        first: nn.Module = build(self.num_inputs[0], self.width, affine=affine)
        return nn.ModuleList([first, pointwise(self.num_inputs[1], self.width, affine=affine)])

    def stride(self, source: int) -> int:
        """Return the stride of an edge from the node `source`."""
        return 2 if self.kind == "reduction" and source < 2 else 1


class _CellStack(nn.Module):
    """Stem, cells and classifier; a cell is called with the two outputs before and the arguments for its kind."""

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        width: int,
        num_cells: int,
        stem_multiplier: int,
        make_cell: "Callable[[_CellShape], _MixedCell | _FixedCell]",
    ) -> None:
        super().__init__()
        stem_width = stem_multiplier * width
        convolution = nn.Conv2d(image_shape[0], stem_width, 3, padding=1, bias=False)
        self.stem = nn.Sequential(convolution, nn.BatchNorm2d(stem_width))
        self.cells = nn.ModuleList()
        self.kinds: list[str] = []
        num_outputs, follows_reduction = (stem_width, stem_width), False
        for number in range(num_cells):
            is_reduction = number in (num_cells // 3, 2 * num_cells // 3)
            width *= 2 if is_reduction else 1
            cell = make_cell(_CellShape(num_outputs, width, KINDS[is_reduction], follows_reduction))
            self.cells.append(cell)
            self.kinds.append(KINDS[is_reduction])
            num_outputs, follows_reduction = (num_outputs[1], cell.num_nodes * width), is_reduction
        self.classifier = nn.Linear(num_outputs[1], num_classes)

    def forward(self, images: Tensor, arguments: Mapping[str, tuple[Tensor, ...]]) -> Tensor:
        before = last = self.stem(images)
        for kind, cell in zip(self.kinds, self.cells, strict=True):
            before, last = last, cell(before, last, *arguments[kind])
        return self.classifier(last.mean(dim=(2, 3)))


class _MixedCell(nn.Module):
    """A cell of the search: all edges, each with all operations."""

    def __init__(self, shape: _CellShape, num_nodes: int) -> None:
        super().__init__()
        self.num_nodes = num_nodes
        self.inputs = shape.inputs(affine=False)
        self.edges = nn.ModuleList(
            _MixedEdge(shape.width, shape.stride(source)) for node in range(num_nodes) for source in range(2 + node)
        )

    def forward(self, before: Tensor, last: Tensor, weights: Tensor) -> Tensor:
        nodes = [self.inputs[0](before), self.inputs[1](last)]
        start = 0
        for _ in range(self.num_nodes):
            count = len(nodes)
            parts = [self.edges[start + source](nodes[source], weights[start + source]) for source in range(count)]
            nodes.append(torch.stack(parts).sum(dim=0))
            start += count
        return torch.cat(nodes[2:], dim=1)


class _MixedEdge(nn.Module):
    """All operations of an edge; `none` is not there, as it adds nothing but its share of the softmax."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.operations = nn.ModuleList(operation(name, width, stride, affine=False) for name in OPERATIONS[1:])

    def forward(self, images: Tensor, weights: Tensor) -> Tensor:
        outputs = torch.stack([apply(images) for apply in self.operations])
        # Autocast leaves tensordot alone.
        return torch.tensordot(weights[1:].to(outputs.dtype), outputs, dims=1)


class _FixedCell(nn.Module):
    """A cell of a genotype: two edges a node, one operation each."""

    def __init__(self, shape: _CellShape, edges: Sequence[Edge]) -> None:
        super().__init__()
        self.num_nodes = len(edges) // 2
        self.inputs = shape.inputs(affine=True)
        self.sources = [source for _, source in edges]
        self.edges = nn.ModuleList(
            operation(name, shape.width, shape.stride(source), affine=True) for name, source in edges
        )

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        nodes = [self.inputs[0](before), self.inputs[1](last)]
        for first in range(0, len(self.sources), 2):
            parts = [self.edges[number](nodes[self.sources[number]]) for number in (first, first + 1)]
            nodes.append(parts[0] + parts[1])
        return torch.cat(nodes[2:], dim=1)
