"""The shapes in a graph while it is changed: those that are asked for are those that there are then."""

import heapq
from collections.abc import Iterable
from typing import Any

from torch import Size, fx, nn

from mlotool.core.errors import ConfigError
from mlotool.spaces.building import input_sizes, settings_of
from mlotool.spaces.fitting import check_changes_nothing
from mlotool.spaces.shapes import GIVEN, Shapes, shape_of
from mlotool.spaces.targets import Place


class PresentShapes:
    """Computes the shapes of nodes anew that read something else than before, when one of them is asked for.

    A node that does not take what it is given now keeps the shape that it had: what comes later in the same mutator
    may mend it, and at the mutator's end it is refused.

    Args:
        shapes: computes them.
        graph: of the model, whose nodes have theirs.
        root: the model.
    """

    def __init__(self, shapes: Shapes, graph: fx.Graph, root: nn.Module) -> None:
        self._shapes, self._graph, self._root = shapes, graph, root
        self._waiting: list[fx.Node] = []

    def note(self, nodes: Iterable[fx.Node]) -> None:
        """Take note of nodes that read something else than before, or call something else."""
        for node in nodes:
            heapq.heappush(self._waiting, node)

    def update(self, until: fx.Node | None = None) -> None:
        """Compute the shapes of nodes that were noted, and of those that read them, as far as they are others.

        Args:
            until: the last node whose shape is wanted; None: all.
        """
        while self._waiting and (until is None or not until < self._waiting[0]):
            node = heapq.heappop(self._waiting)
            if node._erased:
                continue
            before = node.meta.get(GIVEN)
            try:
                self._shapes.infer_node(node, self._root)
            except ConfigError:
                continue
            if node.meta.get(GIVEN) is not before:
                self.note(node.users)

    def of(self, node: fx.Node) -> Size | None:
        """Return the shape of what a node returns now, without the batch; None where that is no tensor."""
        self.update(node)
        return shape_of(node)

    def settings_at(self, place: Place) -> dict[str, Any]:
        """Return what a module at a place would be made with (see `settings_of`), as others have left the place."""
        after = self.of(place.nodes[-1])
        before = self.of(place.inputs[0]) if place.inputs else None
        found = settings_of(place.module, before, after)
        if before and not all(self._shapes.is_computed(node, self._root) for node in place.nodes):
            # What stands there was made for the sizes that it was given before.
            found |= input_sizes(before)
        return found

    def infer_new(self, node: fx.Node) -> None:
        """Compute the shape of a node that calls a new module.

        Raises:
            InfeasibleModelError: it does not take what it is given, or changes it.
        """
        for source in node.all_input_nodes:
            self.update(source)
        self._shapes.infer_node(node, self._root)
        check_changes_nothing(node)
        self.note(node.users)

    def infer_callers(self, path: str) -> None:
        """Compute the shapes of the nodes that call a new module.

        Raises:
            InfeasibleModelError: one does not take what it is given, or changes it.
        """
        for node in self._graph.nodes:
            if node.op == "call_module" and node.target == path:
                self.infer_new(node)

    def infer(self) -> None:
        """Compute all shapes.

        Raises:
            InfeasibleModelError: a node does not take what it is given, or stretches it.
        """
        self._waiting.clear()
        self._shapes.infer(self._graph, self._root)
