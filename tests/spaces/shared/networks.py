"""Small models for tests of shared spaces."""

from functools import partial

import torch
from torch import Tensor, nn

from mlotool.spaces import Branch, Cell, Grow, Input, Insert, KeepsShape, Operator, Repeat, Split

POINTWISE = partial(nn.Conv2d, kernel_size=1)
WIDE = partial(nn.Conv2d, kernel_size=3, padding=1)
FIVE = partial(nn.Conv2d, kernel_size=5)
BLOCKS = {"type": "Block"}


class Block(nn.Module):
    """A convolution with a normalization and a way around both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x))) + x


class Net(nn.Module):
    """Three blocks at two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.first, self.second = Block(4), Block(4)
        self.down = nn.Conv2d(4, 8, 3, 2, 1)
        self.third = Block(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.second(self.first(self.stem(x))))
        return self.head(self.third(x).mean((2, 3)))


def kernel(**settings):
    where = {"type": "Conv2d", "where": KeepsShape()}
    return Operator("kernel", where, {"k3": None, "k5": FIVE}, **settings)


def depth(counts=(1, 0, 3)):
    return Repeat("depth", BLOCKS, counts)


def cell(**settings):
    candidates = {"c1": POINTWISE, "c3": WIDE, "same": None}
    return Cell("cell", BLOCKS, candidates, num_nodes=2, ends="all", **settings)


def grow(steps):
    mutators = {"none": None, "behind": partial(Insert, candidates={"tanh": nn.Tanh, "conv": POINTWISE})}
    return Grow("grow", {"type": "Conv2d"}, mutators, steps=steps)


SPACES = {
    "kernels": lambda: [kernel()],
    "tied_kernels": lambda: [kernel(tied=True)],
    "depths": lambda: [depth()],
    "branches": lambda: [Branch("branch", BLOCKS, {"none": None, "c1": POINTWISE, "c3": WIDE})],
    "projected": lambda: [Branch("branch", "second", {"none": None, "c3": WIDE}, "concat", POINTWISE)],
    "inserted": lambda: [Insert("norm", {"type": "Conv2d"}, {"none": None, "norm": nn.BatchNorm2d, "tanh": nn.Tanh})],
    "inputs": lambda: [Input("skip", "second", {"type": "Conv2d"}, most=4)],
    "splits": lambda: [Split("split", BLOCKS, {"none": None, "tanh": nn.Tanh, "c1": POINTWISE})],
    "cells": lambda: [cell(project=POINTWISE)],
    "tied_cells": lambda: [cell(end="sum", tied=True)],
    "blocks": lambda: [Operator("block", BLOCKS, {"block": None, "skip": nn.Identity, "c3": WIDE})],
    "kernels_in_depths": lambda: [kernel(), depth()],
    "all": lambda: [kernel(tied=True), depth((1, 2)), Branch("beside", "first", {"none": None, "c1": POINTWISE})],
    "kernels_in_blocks": lambda: [kernel(), Operator("block", BLOCKS, {"block": None, "skip": nn.Identity})],
    "grown": lambda: [grow(1)],
}
