"""A model's graph as few boxes: what no mutator has changed becomes a box with a count."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlotool.report.model_nodes import ModelNode

MAX_LINKS = 2_000
"""Wires of a part, counted at each row that they pass; a part with more is one box."""


@dataclass(frozen=True)
class ModelBox:
    """Nodes that are drawn as one.

    Args:
        nodes: in their order.
        inputs: numbers of the boxes that it reads.
    """

    nodes: tuple[ModelNode, ...]
    inputs: tuple[int, ...] = ()

    @property
    def num_changed(self) -> int:
        """How many of its nodes a mutator has made or changed."""
        return sum(bool(each.mutator) for each in self.nodes)


@dataclass
class ModelPart:
    """Boxes that nothing but the last box of the part before leads to, and of which nothing but the last is read.

    Args:
        boxes: by their numbers, in their order.
        entry: number of the last box of the part before; None in the first one.
    """

    boxes: dict[int, ModelBox] = field(default_factory=dict)
    entry: int | None = None


def model_parts(nodes: Sequence[ModelNode]) -> list[ModelPart]:
    """Return a graph as parts one after the other.

    Args:
        nodes: each reads nodes before it alone.

    Example:
        >>> names, mutators = ["x", "a", "b", "c"], ["", "", "kernel", ""]
        >>> inputs = [(), ("x",), ("a",), ("b",)]
        >>> nodes = [ModelNode(*each[:1], "Linear", each[1], "", each[2]) for each in zip(names, inputs, mutators)]
        >>> [[len(box.nodes) for box in part.boxes.values()] for part in model_parts(nodes)]
        [[2], [1], [1]]
    """
    # Parameters and modes that a graph reads by name are none of its layers.
    left_out = {each.id for each in nodes if each.kind == "get_attr" and not each.mutator and not each.inputs}
    kept = [each for each in nodes if each.id not in left_out]
    parts: list[ModelPart] = []
    number = 0
    for region in _merged(_regions(kept)):
        part = ModelPart(entry=number - 1 if number else None)
        for box in _boxes(region, number):
            part.boxes[number] = box
            number += 1
        parts.append(part)
    return parts


def _regions(nodes: Sequence[ModelNode]) -> Iterator[list[ModelNode]]:
    """Yield the pieces between nodes through which all passes."""
    places = {each.id: place for place, each in enumerate(nodes)}
    last_use = list(range(len(nodes)))
    for place, each in enumerate(nodes):
        for one in each.inputs:
            if one in places:
                last_use[places[one]] = place
    region: list[ModelNode] = []
    reach = 0
    for place, each in enumerate(nodes):
        region.append(each)
        if reach <= place:
            yield region
            region = []
        reach = max(reach, last_use[place])
    if region:
        yield region


def _merged(regions: Iterator[list[ModelNode]]) -> list[list[ModelNode]]:
    """Put pieces together that stand beside each other and that no mutator has changed."""
    found: list[list[ModelNode]] = []
    for region in regions:
        if found and not _is_changed(region) and not _is_changed(found[-1]):
            found[-1] += region
        else:
            found.append(region)
    return found


def _is_changed(nodes: Sequence[ModelNode]) -> bool:
    return any(each.mutator for each in nodes)


def _boxes(region: Sequence[ModelNode], first: int) -> list[ModelBox]:
    """Return the boxes of a region; what its first nodes read is the box before `first`."""
    if not _is_changed(region) or len(region) == 1:
        return [ModelBox(tuple(region), (first - 1,) if first else ())]
    groups = _chains(region)
    numbers = {node.id: first + place for place, group in enumerate(groups) for node in group}
    boxes = []
    for place, group in enumerate(groups):
        # What is read from outside of the region is the one box before it.
        read = (numbers.get(one, first - 1) for one in group[0].inputs)
        inputs = dict.fromkeys(each for each in read if each not in (first + place, -1))
        boxes.append(ModelBox(tuple(group), tuple(inputs)))
    return boxes if _num_links(boxes, first) <= MAX_LINKS else [ModelBox(tuple(region), (first - 1,) if first else ())]


def _chains(region: Sequence[ModelNode]) -> list[list[ModelNode]]:
    """Return the nodes, those together of which each that is unchanged alone reads the unchanged one before it."""
    readers = Counter(one for each in region for one in each.inputs)
    groups: dict[str, list[ModelNode]] = {}
    found: list[list[ModelNode]] = []
    for each in region:
        before = groups.get(each.inputs[0]) if len(each.inputs) == 1 else None
        is_joined = before is not None and not each.mutator and not before[-1].mutator
        if before is not None and is_joined and readers[each.inputs[0]] == 1:
            before.append(each)
            groups[each.id] = before
        else:
            groups[each.id] = [each]
            found.append(groups[each.id])
    return found


def _num_links(boxes: Sequence[ModelBox], first: int) -> int:
    """Return how many rows the wires of a region pass."""
    depth: dict[int, int] = {first - 1: 0}
    total = 0
    for number, box in enumerate(boxes, first):
        depth[number] = 1 + max((depth[each] for each in box.inputs), default=0)
        total += sum(depth[number] - depth[each] for each in box.inputs)
    return total
