"""Networks of cells, on whose edges a space of models chooses operations, and of blocks in the places of cells."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.settings import Count, Layers, Shape, target

# b: batch, c: channels, h, w: height and width


@target("module")
def operation(name: str, width: Count, stride: Count, *, affine: bool) -> nn.Module:
    """Build one operation of a cell: (b, width, h, w) to (b, width, h / stride, w / stride).

    Args:
        name: `none`, `skip_connect`, `max_pool_3x3`, `avg_pool_3x3`, `sep_conv_3x3`, `sep_conv_5x5`, `dil_conv_3x3` or
            `dil_conv_5x5`.
        width: c.
        stride: 1 or 2.
        affine: whether BatchNorm has a learned scale and shift. false is for a search, since they would rescale the
            operations that the architecture weights; it also normalizes the results of pooling.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), section 3.1.
    """
    build: dict[str, Callable[[], nn.Module]] = {
        "none": lambda: Zero(stride),
        "max_pool_3x3": lambda: _pool(nn.MaxPool2d(3, stride, 1), width, affine),
        "avg_pool_3x3": lambda: _pool(nn.AvgPool2d(3, stride, 1, count_include_pad=False), width, affine),
        "skip_connect": lambda: nn.Identity() if stride == 1 else HalvingConvolution(width, width, affine=affine),
        "sep_conv_3x3": lambda: _separable(width, 3, stride, affine),
        "sep_conv_5x5": lambda: _separable(width, 5, stride, affine),
        "dil_conv_3x3": lambda: nn.Sequential(*_depthwise(width, 3, stride, 2, affine)),
        "dil_conv_5x5": lambda: nn.Sequential(*_depthwise(width, 5, stride, 2, affine)),
    }
    return build[name]()


@target("module")
def pointwise(num_inputs: Count, num_outputs: Count, *, affine: bool) -> nn.Sequential:
    """Build ReLU, 1 x 1 convolution and BatchNorm, which bring a cell's inputs to its width."""
    convolution = nn.Conv2d(num_inputs, num_outputs, 1, bias=False)
    return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2d(num_outputs, affine=affine))


@target("module")
def crossed_convolution(width: Count, stride: Count, size: Count = 3, *, affine: bool) -> nn.Sequential:
    """Build ReLU, a convolution along the rows, one along the columns, and BatchNorm.

    Args:
        width: c.
        stride: 1 or 2.
        size: length of both kernels, odd; the paper has 7, for larger images.
        affine: see `operation`.

    Source: Real et al. 2019, AmoebaNet (arXiv 1802.01548), section 3.1: "1x7 then 7x1 convolution".
    """
    rows = nn.Conv2d(width, width, (1, size), (1, stride), (0, size // 2), bias=False)
    columns = nn.Conv2d(width, width, (size, 1), (stride, 1), (size // 2, 0), bias=False)
    return nn.Sequential(nn.ReLU(), rows, columns, nn.BatchNorm2d(width, affine=affine))


class Zero(nn.Module):
    """No connection: zeros, in the size that the stride gives."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, images: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(images[:, :, :: self.stride, :: self.stride])


class HalvingConvolution(nn.Module):
    """Halves the image without losing a pixel: two 1 x 1 convolutions of stride 2, one pixel apart, concatenated."""

    def __init__(self, num_inputs: int, num_outputs: int, *, affine: bool) -> None:
        super().__init__()
        half = num_outputs // 2
        # A space reads it for what it puts in this place: of an odd size, shapes do not tell.
        self.stride = 2
        self.even = nn.Conv2d(num_inputs, half, 1, stride=self.stride, bias=False)
        self.odd = nn.Conv2d(num_inputs, num_outputs - half, 1, stride=self.stride, bias=False)
        self.norm = nn.BatchNorm2d(num_outputs, affine=affine)

    def forward(self, images: Tensor) -> Tensor:
        """Return (b, num_outputs, h / 2, w / 2), rounded up."""
        images = F.relu(images)
        # Zeros behind the last row and column: an odd size has no odd pixel there.
        shifted = F.pad(images, [0, 1, 0, 1])[:, :, 1:, 1:]
        return self.norm(torch.cat([self.even(images), self.odd(shifted)], dim=1))


def _pool(pool: nn.Module, width: int, affine: bool) -> nn.Module:
    return pool if affine else nn.Sequential(pool, nn.BatchNorm2d(width, affine=False))


def _separable(width: int, size: int, stride: int, affine: bool) -> nn.Sequential:
    return nn.Sequential(*_depthwise(width, size, stride, 1, affine), *_depthwise(width, size, 1, 1, affine))


def _depthwise(width: int, size: int, stride: int, dilation: int, affine: bool) -> list[nn.Module]:
    padding = dilation * (size - 1) // 2
    return [
        nn.ReLU(),
        nn.Conv2d(width, width, size, stride, padding, dilation, groups=width, bias=False),
        nn.Conv2d(width, width, 1, bias=False),
        nn.BatchNorm2d(width, affine=affine),
    ]


# b: batch, c: channels, h, w: height and width, k: classes

# The two kinds of cells.
KINDS = ("normal", "reduction")


@target("module")
class CellNetwork(nn.Module):
    """A network of cells in which each node reads all nodes before it: the base of the DARTS space.

        node_j = sum over i < j of operation_ij(node_i), cell = concatenation of all nodes but its two inputs

    Two cells, after one and two thirds of the depth, are reduction cells, which halve the image and double the width.
    The edges of a cell are its modules `normal.0`, `normal.1`, .. or `reduction.0`, .., ordered by the node that they
    lead to, then by the node that they come from. Each edge is a skip connection at first. The paper's auxiliary head
    and drop-path are left out.

    Args:
        image_shape: (c, h, w); only c matters.
        num_classes: k.
        width: channels of a node in the first cell.
        num_cells: at least 3 for cells of both kinds.
        num_nodes: intermediate nodes of a cell; 4 make a cell of 7 nodes with 14 edges.
        stem_multiplier: channels of the first convolution, in units of `width`.
        affine: whether BatchNorm in cells has a learned scale and shift. false is for a search, since they would
            rescale the operations that the architecture weights.

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
            kind = KINDS[is_reduction]
            self.cells.append(_Cell(kind, num_outputs, width, num_nodes, affine, follows_reduction))
            num_outputs, follows_reduction = (num_outputs[1], num_nodes * width), is_reduction
        self.classifier = nn.Linear(num_outputs[1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, k) of images (b, c, h, w)."""
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return self.classifier(last.mean(dim=(2, 3)))


class _Cell(nn.Module):
    """A cell of a kind; `num_inputs` are the channels of the two cells before it, `width` those of a node."""

    def __init__(
        self, kind: str, num_inputs: tuple[int, int], width: int, num_nodes: int, affine: bool, follows_reduction: bool
    ) -> None:
        super().__init__()
        self.num_nodes, self.kind = num_nodes, kind
        bring = HalvingConvolution if follows_reduction else pointwise
        first: nn.Module = bring(num_inputs[0], width, affine=affine)
        self.inputs = nn.ModuleList([first, pointwise(num_inputs[1], width, affine=affine)])
        sources = [source for node in range(num_nodes) for source in range(2 + node)]
        strides = [2 if kind == "reduction" and source < 2 else 1 for source in sources]
        edges = (operation("skip_connect", width, stride, affine=affine) for stride in strides)
        self.add_module(kind, nn.ModuleList(edges))

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        nodes = [self.inputs[0](before), self.inputs[1](last)]
        edges = iter(self.get_submodule(self.kind).children())
        for _ in range(self.num_nodes):
            nodes.append(reduce(torch.add, [next(edges)(node) for node in nodes]))
        return torch.cat(nodes[2:], dim=1)


@target("module")
class StrongestEdges:
    """Derives cells from the probabilities of the operations on their edges: each node keeps its strongest edges.

        strength of an edge = max over operations but `none` of p
        each node keeps its two strongest incoming edges, each with its strongest operation but `none`

    The decisions of a kind of cells are `<kind>_0`, `<kind>_1`, .., one for each edge, ordered by the node that the
    edge leads to, then by the node that it comes from. Each node reads both inputs of the cell and all nodes before it.

    Args:
        none: the name of the candidate without a connection, which is chosen for edges that are not kept.
        num_kept: number of edges that each node keeps.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), section 2.4.

    Example:
        >>> import torch
        >>> operations = ("none", "skip", "pool")
        >>> edges = [[0.1, 0.8, 0.1], [0.9, 0.1, 0.0], [0.1, 0.2, 0.7], [0.2, 0.5, 0.3], [0.4, 0.3, 0.3]]
        >>> probabilities = {f"normal_{number}": torch.tensor(edge) for number, edge in enumerate(edges)}
        >>> found = StrongestEdges()(dict.fromkeys(probabilities, operations), probabilities)
        >>> list(found.values())
        ['skip', 'skip', 'pool', 'skip', 'none']
    """

    def __init__(self, none: str = "none", num_kept: Count = 2) -> None:
        self.none, self.num_kept = none, num_kept

    def __call__(
        self, candidates: Mapping[str, Sequence[str | int]], probabilities: Mapping[str, Tensor]
    ) -> dict[str, str | int]:
        """Return a candidate for each decision.

        Args:
            candidates: the names of the candidates, by decision.
            probabilities: (k,), one per candidate, by decision.

        Raises:
            ConfigError: the number of edges of a kind does not fit a cell, or `none` is not among the candidates.
        """
        chosen: dict[str, str | int] = {}
        for kind in dict.fromkeys(name.rpartition("_")[0] for name in candidates):
            edges = [name for name in candidates if name.rpartition("_")[0] == kind]
            for incoming in _by_node(kind, edges):
                best = {name: self._strongest(name, candidates[name], probabilities[name]) for name in incoming}
                kept = sorted(incoming, key=lambda name: best[name][0], reverse=True)[: self.num_kept]
                chosen |= {name: best[name][1] if name in kept else self.none for name in incoming}
        return chosen

    def _strongest(self, name: str, candidates: Sequence[str | int], probability: Tensor) -> tuple[float, str | int]:
        expected = f"the candidate of '{name}' that is no connection, one of {', '.join(map(str, candidates))}"
        require(self.none in candidates, "rule.none", self.none, expected)
        strengths = zip(probability.tolist(), candidates, strict=True)
        return max((pair for pair in strengths if pair[1] != self.none), key=lambda pair: pair[0])


def _by_node(kind: str, edges: Sequence[str]) -> list[Sequence[str]]:
    """Return the edges of a cell by the node that they enter: two for the first node, three for the next one, ..."""
    nodes: list[Sequence[str]] = []
    start = 0
    while start < len(edges):
        nodes.append(edges[start : start + 2 + len(nodes)])
        start += len(nodes[-1])
    expected = "one for each edge of a cell: 2, 5, 9, 14, .. of 1, 2, 3, 4, .. nodes"
    is_whole = len(nodes[-1]) == 1 + len(nodes)
    require(is_whole, f"rule: decisions '{kind}_0', ..", len(edges), expected, "Correct the mutator's places.")
    return nodes


# b: batch, c: channels, h, w: height and width, k: classes


@target("module")
class TwoBackNetwork(nn.Module):
    """A stem, blocks that each read the two results before them, the mean over pixels, a linear layer.

        x_i = block_i(latest_i(x_{i-1}), before_i(x_{i-2})),   block(x, y) = separable(x) + y

    `latest` and `before` bring the inputs of a block to its width and to equal size; a block that halves the image
    reads its second input through a convolution of stride 2. So a mutator can put a cell in the place of each block
    (`blocks.0`, `blocks.1`, ..).

    Args:
        image_shape: (c, h, w); only c matters.
        num_classes: k.
        width: channels of the first block.
        halves: for each block, whether it halves the image and doubles the width.

    Source: Zoph et al. 2018, NASNet (arXiv 1707.07012), figure 2: the stack of cells; here with plain blocks.

    Example:
        >>> import torch
        >>> TwoBackNetwork([1, 8, 8], 10)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, image_shape: Shape, num_classes: Count, width: Count = 8, halves: Sequence[bool] = (False, True, False)
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(image_shape[0], width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.latest, self.before, self.blocks = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        num_latest = num_before = width
        is_larger = False
        for is_halving in halves:
            width *= 2 if is_halving else 1
            self.latest.append(pointwise(num_latest, width, affine=True))
            bring = HalvingConvolution if is_larger else pointwise
            self.before.append(bring(num_before, width, affine=True))
            self.blocks.append(_Block(width, 2 if is_halving else 1))
            num_latest, num_before, is_larger = width, num_latest, is_halving
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, k) of images (b, c, h, w)."""
        last = before = self.stem(images)
        for bring_latest, bring_before, block in zip(self.latest, self.before, self.blocks, strict=True):
            last, before = block(bring_latest(last), bring_before(before)), last
        return self.classifier(last.mean(dim=(2, 3)))


class _Block(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.separable = operation("sep_conv_3x3", width, stride, affine=True)
        self.skip = operation("skip_connect", width, stride, affine=True)

    def forward(self, latest: Tensor, before: Tensor) -> Tensor:
        return self.separable(latest) + self.skip(before)
