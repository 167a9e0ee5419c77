"""A model as a graph that mutators change: create, delete, connect, replace, insert."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Size, fx, nn

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.core.messages import shown
from mlotool.spaces.alternatives import Alternatives
from mlotool.spaces.building import Build, settings_of
from mlotool.spaces.changes import Change
from mlotool.spaces.copies import put_copies
from mlotool.spaces.fitting import dtype_at
from mlotool.spaces.in_place import check_order, is_changed, without_in_place
from mlotool.spaces.new_modules import NewModules
from mlotool.spaces.node_order import last_of, nodes_in
from mlotool.spaces.own_behaviour import check_keeps
from mlotool.spaces.places import Places, blocks_of, input_of, node_of
from mlotool.spaces.present_shapes import PresentShapes
from mlotool.spaces.room import Room
from mlotool.spaces.shapes import Shapes, shapes_of_result
from mlotool.spaces.targets import Place, as_target, node_id
from mlotool.spaces.tracing import BLOCKS, ID, OWNER


class ModelGraph(Alternatives):
    """A traced model, and what mutators do to it.

    Args:
        root: the model; its modules are changed in place, and in evaluation until `modules.restore_modes()`.
        graph: of its forward, with ids.
        shapes: of its inputs.
        seed: of new modules.
        anew: makes the model anew, for modules that are to be had once more; None where nobody can.

    Attributes:
        modules: makes those that are new.
        changes: what mutators have done, in order.
        is_rewired: whether more has been done than to put one module in the place of another.
    """

    _modules_kind: ClassVar[type[NewModules]] = NewModules
    _places_kind: ClassVar[type[Places]] = Places
    _room_kind: ClassVar[type[Room]] = Room

    def __init__(
        self, root: nn.Module, graph: fx.Graph, shapes: Shapes, seed: int, anew: Callable[[], nn.Module] | None
    ) -> None:
        super().__init__()
        self.root, self.graph = root, graph
        self.modules, self._shapes = self._modules_kind(root, seed, anew), PresentShapes(shapes, graph, root)
        root.eval()
        self._room = self._room_kind(graph, self.modules)
        self.changes: list[Change] = []
        self.is_rewired = False
        self._mutator = ""
        self._blocks: tuple[str, ...] = ()
        self._places = self._places_kind(root, graph)
        try:
            shapes.infer(graph, root, is_base=True)
        except InfeasibleModelError as error:
            raise ConfigError(f"inputs: {error}") from error
        self._result = shapes_of_result(graph)

    def find(self, at: Any, *, of_some: bool = False) -> list[Place]:
        """Return the places that a target describes, in the order in which the model computes them.

        Args:
            at: a target, as in a recipe (see `Target`); or a place, which is the only one then.
            of_some: whether a place may be one that only some models of a shared space have; a decision that is named
                after the number of a place wants those that all have.

        Raises:
            ConfigError: there is none, or two share a node; an InfeasibleModelError once the graph has been changed.
        """
        self._shapes.update()
        try:
            return [at] if isinstance(at, Place) else self._places.find(as_target(at), of_some=of_some)
        except ConfigError as error:
            raise (InfeasibleModelError if self.changes else ConfigError)(str(error)) from error

    def node(self, name: str) -> fx.Node:
        """Return a node by its id.

        Raises:
            ConfigError: there is none.
        """
        return node_of(self.graph, name)

    def reader_of(self, place: Place) -> tuple[fx.Node, fx.Node]:
        """Return the first node of a place that reads its one input, and that input."""
        source = input_of(place)
        return next(node for node in place.nodes if source in node.all_input_nodes), source

    def fits(self, reader: fx.Node, now: fx.Node, source: fx.Node) -> bool:
        """Say whether a node could read another one in the place of one that it reads."""
        order = {each: number for number, each in enumerate(self.graph.nodes)}
        is_other = source is not now and order[source] < order[reader]
        return is_other and self._shapes.of(source) == self._shapes.of(now) and not is_changed(self.graph, source)

    def create(self, name: str, build: Build, inputs: Sequence[fx.Node], shape: Size | None = None) -> fx.Node:
        """Add a node with a new module, which nobody reads yet.

        Args:
            name: its id, of letters, digits and `_`; the module is kept under it.
            build: makes the module; it is given the settings of a place of these shapes.
            inputs: what it is called with.
            shape: what it is to return, without the batch; None: that of the first input.

        Returns:
            the node.
        """
        before = self._shapes.of(inputs[0])
        return self._create(name, build, inputs, settings_of(None, before, before if shape is None else shape))

    def call(self, name: str, function: Callable[..., Any], inputs: Sequence[Any]) -> fx.Node:
        """Add a node that calls a function of tensors, which nobody reads yet.

        Args:
            name: its id.
            function: such as `torch.add`.
            inputs: what it is called with: nodes, lists of nodes, numbers.

        Returns:
            the node.
        """
        self._room.check_name(name)
        with self.graph.inserting_after(last_of(self.graph, nodes_in(inputs))):
            node = self.graph.call_function(function, tuple(inputs))
        return self._created(node, name)

    @contextmanager
    def beside(self, place: Place) -> Iterator[None]:
        """Let nodes that are created inside of the block be parts of the modules that a place is a part of."""
        before, self._blocks = self._blocks, blocks_of(place)
        try:
            yield
        finally:
            self._blocks = before

    def check_room(self, num_nodes: int) -> None:
        """Refuse more new nodes than a model may have, before they are made.

        Raises:
            InfeasibleModelError: there is no room for so many.
        """
        self._room.check(num_nodes)

    def delete(self, place: Place) -> None:
        """Take nodes out; who has read the last one reads what the first one has read.

        Raises:
            InfeasibleModelError: there is no one input that could take their place.
        """
        self._let_read(list(place.nodes[-1].users), place.nodes[-1], input_of(place))
        self._erase(place)
        self._note("delete", place.id, is_rewired=True)

    def connect(self, node: fx.Node, source: fx.Node, position: int = 0) -> None:
        """Let a node read another one.

        Args:
            node: that reads.
            source: that is read, and stands before it.
            position: which of its inputs; behind the last one, it reads one more.

        Raises:
            InfeasibleModelError: the source comes later, or there is no such input.
        """
        inputs = list(node.all_input_nodes)
        order = {each: number for number, each in enumerate(self.graph.nodes)}
        if not 0 <= position <= len(inputs) or order[source] >= order[node]:
            raise InfeasibleModelError(
                f"cannot connect input {position} of '{node_id(node)}' to '{node_id(source)}'; expected "
                f"one of its {len(inputs)} inputs, and a source that is computed before. Correct the candidates."
            )
        if position == len(inputs):
            node.args = (*node.args, source)
        else:
            node.replace_input_with(inputs[position], source)
        self._shapes.note([node])
        self._note("connect", node_id(node), is_rewired=True)

    def replace(self, place: Place, build: Build, name: str) -> fx.Node:
        """Put a new module in the place of nodes.

        Args:
            place: one node, or several with one input.
            build: makes the module; it is given the settings of the one that stands there.
            name: id of the new node where a function, several nodes or one call of several of a module are replaced;
                other nodes of modules keep their own.

        Returns:
            the node.
        """
        last = place.nodes[-1]
        settings = self._shapes.settings_at(place)
        if len(place.nodes) == 1 and last.op == "call_module" and not self._is_called_elsewhere(last):
            return self._replace_module(place, last, build, settings)
        with self.beside(place):
            node = self._create(name, build, [input_of(place)], settings, before=last)
        layers = [self.root.get_submodule(str(each.target)) for each in place.nodes if each.op == "call_module"]
        check_keeps(place.id, layers, self.root.get_submodule(str(node.target)))
        self.put(place, node)
        return node

    def put(self, place: Place, node: fx.Node) -> None:
        """Put a node that was created in the place of others: who has read the last of them reads it."""
        self._let_read(list(place.nodes[-1].users), place.nodes[-1], node)
        self._erase(place)
        self._note("replace", place.id, is_rewired=True)

    def insert(self, place: Place, build: Build, name: str) -> fx.Node:
        """Put a new module behind a place: it reads it, and whoever has read it reads the new one.

        Args:
            place: behind which.
            build: makes the module.
            name: id of the new node.

        Returns:
            the node.
        """
        last = place.nodes[-1]
        readers = list(last.users)
        shape = self._shapes.of(last)
        with self.beside(place):
            node = self._create(name, build, [last], settings_of(None, shape, shape))
        self._let_read(readers, last, node)
        self._note("insert", name, is_rewired=True)
        return node

    def repeat(self, place: Place, name: str) -> fx.Node:
        """Put nodes once more behind themselves, with modules of their own.

        Args:
            place: one node, or several with one input.
            name: begins the ids of the new nodes.

        Returns:
            the last new node.

        Raises:
            ConfigError: a module cannot be made once more.
        """
        input_of(place)
        self._room.check()
        last = place.nodes[-1]
        readers = list(last.users)
        copies = put_copies(self.graph, self.root, self.modules, place, name)
        self._shapes.note(copies)
        self._let_read(readers, last, copies[-1])
        self._note("create", name, is_rewired=True)
        return copies[-1]

    def without_in_place(self) -> None:
        """Let nodes return new tensors where they may: mutators may then change each without the others.

        Raises:
            ConfigError: what a node changes is read afterwards under another name.
        """
        without_in_place(self.graph, self.root)
        self._shapes.infer()

    @contextmanager
    def by(self, mutator: str) -> Iterator[None]:
        """Let a mutator work on the graph, and check what it leaves.

        Raises:
            InfeasibleModelError: shapes do not fit, or the model returns something else than before.
        """
        self._mutator = mutator
        self.forget()
        try:
            yield
            self._check()
        except ConfigError as error:
            raise type(error)(f"mutator {shown(mutator)}: {error}") from error
        finally:
            self._mutator = ""

    def _replace_module(self, place: Place, node: fx.Node, build: Build, settings: dict[str, Any]) -> fx.Node:
        path = self.modules.put(str(node.target), build, settings, dtype_at([*place.inputs, node]))
        self._note("replace", place.id)
        self._shapes.infer_callers(path)
        return node

    def _is_called_elsewhere(self, node: fx.Node) -> bool:
        return sum((each.op, each.target) == (node.op, node.target) for each in self.graph.nodes) > 1

    def _create(
        self,
        name: str,
        build: Build,
        inputs: Sequence[fx.Node],
        settings: dict[str, Any],
        before: fx.Node | None = None,
    ) -> fx.Node:
        self._room.check_name(name)
        path = self.modules.put(name, build, settings, dtype_at([*inputs, *([before] if before else [])]))
        last = last_of(self.graph, inputs)
        with self.graph.inserting_before(before) if before else self.graph.inserting_after(last):
            node = self.graph.create_node("call_module", path, tuple(inputs))
        return self._created(node, name)

    def _created(self, node: fx.Node, name: str) -> fx.Node:
        node.meta |= {ID: name, OWNER: "", BLOCKS: self._blocks}
        self._note("create", name, is_rewired=True)
        self._shapes.infer_new(node)
        return node

    def _erase(self, place: Place) -> None:
        for node in reversed(place.nodes):
            if not node.users:
                self.graph.erase_node(node)

    def _let_read(self, readers: list[fx.Node], before: fx.Node, source: fx.Node) -> None:
        """Let the readers of a node read another one in its place."""
        for reader in readers:
            reader.replace_input_with(before, source)
        self._shapes.note(readers)

    def _check(self) -> None:
        self.graph.lint()
        self._shapes.infer()
        check_order(self.graph)
        result = shapes_of_result(self.graph)
        if result != self._result:
            raise InfeasibleModelError(
                f"the model returns {result}, and without mutators {self._result}; expected the same. "
                "Correct the candidates."
            )

    def _note(self, operation: str, name: str, *, is_rewired: bool = False) -> None:
        self.changes.append(Change(self._mutator, operation, name))
        self.is_rewired |= is_rewired
