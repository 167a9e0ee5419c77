"""A model as a graph, and the operations by which mutators change it: create, delete, connect, replace, insert."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Size, fx, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.core.messages import shown
from mlotool.spaces.building import Build, NewModules, dtype_at, input_sizes, settings_of
from mlotool.spaces.decisions import Value, choose
from mlotool.spaces.places import Place, Places, as_target, node_of
from mlotool.spaces.shapes import CHANGED, GIVEN, STRETCHED, VALUE, Shapes, shape_of, shapes_of_result
from mlotool.spaces.tracing import BLOCKS, CALLS, ID, OWNER, WHOLE, forward_of, last_of, node_id, nodes_in

# A model to which mutators add more is refused, before it takes minutes and all memory.
MAX_NEW_NODES = 2_000

V = TypeVar("V", bound=Value)


@dataclass(frozen=True)
class Change:
    """One operation of a mutator on the graph.

    Args:
        mutator: its name.
        operation: create, delete, connect, replace or insert.
        node: id of the node that it concerns.
    """

    mutator: str
    operation: str
    node: str


class ModelGraph:
    """A traced model, and the operations by which mutators change it.

    If the inputs of a node change, its shape is computed again when it is needed. A node that does not accept its new
    input keeps its old shape meanwhile, as the same mutator may still repair this; at the mutator's end it is an error.

    Args:
        root: the model; its modules are changed in place, and are in eval mode until `modules.restore_modes()`.
        graph: of its forward, with ids.
        shapes: of its inputs.
        seed: of new modules.
        anew: makes the model anew, for modules that are to be had once more; None where nobody can.

    Attributes:
        is_shared: whether it holds all models of a space at once (see `SharedSpace`).
        modules: makes those that are new.
        changes: the changes that mutators have made, in order.
        is_rewired: whether anything but the replacement of single modules was done.
    """

    is_shared: ClassVar[bool] = False
    _modules_kind: ClassVar[type[NewModules]] = NewModules
    _places_kind: ClassVar[type[Places]] = Places

    def __init__(
        self, root: nn.Module, graph: fx.Graph, shapes: Shapes, seed: int, anew: Callable[[], nn.Module] | None
    ) -> None:
        self.root, self.graph = root, graph
        self.modules, self._places = self._modules_kind(root, seed, anew), self._places_kind(root, graph)
        root.eval()
        self.changes: list[Change] = []
        self.is_rewired = False
        self._shapes, self._waiting = shapes, list[fx.Node]()
        self._most = len(graph.nodes) + MAX_NEW_NODES
        self._mutator = ""
        self._decided: dict[str, Any] = {}
        self._blocks: tuple[str, ...] = ()
        try:
            shapes.infer(graph, root, is_base=True)
        except InfeasibleModelError as error:
            raise ConfigError(f"inputs: {error}") from error
        self._result = shapes_of_result(graph)

    def alternatives(self, name: str, candidates: Iterable[V]) -> Iterator[V]:
        """Yield the candidate that is decided; in a shared space, yield each candidate, one after the other.

        The body of the loop makes the changes for the candidate. A mutator that uses `alternatives` instead of `choose`
        also works in shared spaces.

        Args:
            name: the decision's name; the same mutator gets the same answer if it asks again.
            candidates: names or whole numbers.
        """
        if name not in self._decided:
            self._decided[name] = choose(name, tuple(candidates))
        yield self._decided[name]

    def select(self, name: str, candidates: Iterable[V], make: Callable[[V], fx.Node]) -> fx.Node:
        """Return the node for the candidate that is decided; in a shared space, a node that switches between all.

        Args:
            name: of the decision.
            candidates: names or whole numbers.
            make: makes a node for one of them, or finds it.
        """
        [node] = [make(value) for value in self.alternatives(name, candidates)]
        return node

    def find(self, at: Any, *, of_some: bool = False) -> list[Place]:
        """Return the places that a target describes, in the order in which the model computes them.

        Args:
            at: a target, as in a recipe (see `Target`); or a place, which is the only one then.
            of_some: whether places may be included that only some models of a shared space have. Use false if decisions
                are named by the number of the place.

        Raises:
            ConfigError: there is none, or two share a node; an InfeasibleModelError once the graph has been changed.
        """
        self._update()
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
        source = place.input
        return next(node for node in place.nodes if source in node.all_input_nodes), source

    def fits(self, reader: fx.Node, now: fx.Node, source: fx.Node) -> bool:
        """Say whether a node could read another one in the place of one that it reads."""
        return source is not now and source < reader and self._shape(source) == self._shape(now)

    def create(self, name: str, build: Build, inputs: Sequence[fx.Node], shape: Size | None = None) -> fx.Node:
        """Add a node with a new module, which no other node reads yet.

        Args:
            name: its id, of letters, digits and `_`; the module is kept under it.
            build: makes the module; it is given the settings of a place of these shapes.
            inputs: what it is called with.
            shape: what it is to return, without the batch; None: that of the first input.

        Returns:
            the node.
        """
        before = self._shape(inputs[0])
        return self._create(name, build, inputs, settings_of(None, before, before if shape is None else shape))

    def call(self, name: str, function: Callable[..., Any], inputs: Sequence[Any]) -> fx.Node:
        """Add a node that calls a function of tensors, which no other node reads yet.

        Args:
            name: its id.
            function: such as `torch.add`.
            inputs: what it is called with: nodes, lists of nodes, numbers.

        Returns:
            the node.
        """
        self._check_name(name)
        with self.graph.inserting_after(last_of(self.graph, nodes_in(inputs))):
            node = self.graph.call_function(function, tuple(inputs))
        return self._created(node, name)

    @contextmanager
    def beside(self, place: Place) -> Iterator[None]:
        """Let nodes that are created inside of the block be parts of the modules that a place is a part of."""
        before, self._blocks = self._blocks, place.blocks
        try:
            yield
        finally:
            self._blocks = before

    def check_room(self, num_nodes: int = 1) -> None:
        """Refuse more new nodes than a model may have, before they are made.

        Raises:
            InfeasibleModelError: there is no room for so many.
        """
        if len(self.graph.nodes) + num_nodes > self._most:
            raise InfeasibleModelError(f"found {MAX_NEW_NODES:,} nodes more than the base has. Lower the counts.")

    def delete(self, place: Place) -> None:
        """Remove nodes; nodes that read the last of them then read the input of the first.

        Raises:
            InfeasibleModelError: there is no one input that could take their place.
        """
        self._let_read(list(place.nodes[-1].users), place.nodes[-1], place.input)
        self._erase(place)
        self._note("delete", place.id, is_rewired=True)

    def connect(self, node: fx.Node, source: fx.Node, position: int = 0) -> None:
        """Connect an input of a node to another node.

        Args:
            node: the node that reads.
            source: the node that is read; it has to come before `node`.
            position: the number of the input; the number after the last one adds an input.

        Raises:
            InfeasibleModelError: the source comes later, or there is no such input.
        """
        inputs = list(node.all_input_nodes)
        if not 0 <= position <= len(inputs) or not source < node:
            fault = f"cannot connect input {position} of '{node_id(node)}' to '{node_id(source)}'"
            raise InfeasibleModelError(f"{fault}; expected one of its {len(inputs)} inputs, and a source before it.")
        if position == len(inputs):
            node.args = (*node.args, source)
        else:
            node.replace_input_with(inputs[position], source)
        self._reads_other([node])
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
        settings = self._settings_at(place)
        calls = [node for node in self.graph.nodes if (node.op, node.target) == ("call_module", last.target)]
        if len(place.nodes) == 1 and calls == [last]:
            return self._replace_module(place, last, build, settings)
        with self.beside(place):
            node = self._create(name, build, [place.input], settings, at=last)
        self.put(place, node)
        return node

    def put(self, place: Place, node: fx.Node) -> None:
        """Put a node that was created in place of others: nodes that read the last of them then read this node."""
        self._let_read(list(place.nodes[-1].users), place.nodes[-1], node)
        self._erase(place)
        self._note("replace", place.id, is_rewired=True)

    def insert(self, place: Place, build: Build, name: str) -> fx.Node:
        """Put a new module after a place: it reads the place, and all nodes that read the place then read the module.

        Args:
            place: the place.
            build: makes the module.
            name: id of the new node.

        Returns:
            the node.
        """
        last = place.nodes[-1]
        readers = list(last.users)
        with self.beside(place):
            node = self.create(name, build, [last])
        self._let_read(readers, last, node)
        self._note("insert", name, is_rewired=True)
        return node

    def repeat(self, place: Place, name: str) -> fx.Node:
        """Add a copy of nodes after themselves, with new modules.

        Args:
            place: one node, or several with one input.
            name: begins the ids of the new nodes.

        Returns:
            the last new node.

        Raises:
            ConfigError: a module cannot be made once more.
            InfeasibleModelError: the place reads a parameter or buffer that is outside of its layers.
        """
        copies: dict[fx.Node, fx.Node] = {place.input: place.nodes[-1]}
        self.check_room()
        last, readers = place.nodes[-1], list(place.nodes[-1].users)
        for node in place.nodes:
            with self.graph.inserting_after(last):
                last = copies[node] = self.graph.node_copy(node, lambda source: copies.get(source, source))
            if node.op in ("call_module", "get_attr"):
                last.target = self._copied(place, node, name)
            last.meta = _known_of_copy(node, name, place.blocks)
        for node in place.nodes:
            # Behind all layers: one whose mode is read may be called itself.
            if node.op == "get_attr":
                self.modules.hold(str(node.target), name)
        self._reads_other([copies[node] for node in place.nodes])
        self._let_read(readers, place.nodes[-1], last)
        self._note("create", name, is_rewired=True)
        return last

    def without_in_place(self) -> None:
        """Let layers and functions with `inplace=True` return new tensors: mutators may then change each node alone.

        Raises:
            ConfigError: another operation changes a tensor in place.
        """
        order = {node: number for number, node in enumerate(self.graph.nodes)}
        layers = {node: self.root.get_submodule(str(node.target)) for node in order if node.op == "call_module"}
        in_place = [
            node
            for node in order
            if node.args and (getattr(layers.get(node), "inplace", None) is True or node.kwargs.get("inplace") is True)
        ]
        for node in in_place:
            if node in layers:
                layers[node].inplace = False  # type: ignore[assignment]
            else:
                node.kwargs = {**node.kwargs, "inplace": False}
            del node.meta[GIVEN]
            [source, *_] = node.all_input_nodes
            # What reads its operand later has found it changed.
            for reader in [reader for reader in source.users if order[reader] > order[node]]:
                reader.replace_input_with(source, node)
        self._infer()
        for node in order:
            for source in node.meta.get(CHANGED, ()):
                fault = f"leaves: node '{node_id(node)}' changes in place what '{node_id(source)}' returns"
                advice = f"Return a new tensor, as x.relu() does, or write leaves: ['{forward_of(node) or WHOLE}']."
                raise ConfigError(f"{fault}, which is not possible in a model that mutators change. {advice}")

    @contextmanager
    def by(self, mutator: str) -> Iterator[None]:
        """Let a mutator, whose decisions have names of their own, work on the graph, and check what it leaves.

        Raises:
            InfeasibleModelError: shapes do not fit, or the model returns something else than before.
        """
        self._mutator, self._decided = mutator, {}
        try:
            yield
            self.graph.lint()
            self._infer()
            if (result := shapes_of_result(self.graph)) != self._result:
                fault = f"the model returns {result}, but without mutators {self._result}"
                raise InfeasibleModelError(f"{fault}; expected the same. Correct the candidates.")
        except ConfigError as error:
            raise type(error)(f"mutator {shown(mutator)}: {error}") from error
        finally:
            self._mutator = ""

    def _copied(self, place: Place, node: fx.Node, name: str) -> str:
        """Return the path of the copy of what a node calls or reads; a copy's mode is that of its own module."""
        path = str(node.target)
        new = f"{name}.{path}"
        if node.op == "get_attr":
            above, _, last = path.rpartition(".")
            if last != "training" or type(getattr(self.root.get_submodule(above), last)) is not bool:
                fault = f"'{place.id}' holds '{node_id(node)}', which cannot be copied"
                raise InfeasibleModelError(f"{fault}. Declare it as a leaf: leaves: ['{place.id}'].")
        elif not self.modules.has(new):
            self.modules.put_once_more(path, name)
        return new

    def _replace_module(self, place: Place, node: fx.Node, build: Build, settings: dict[str, Any]) -> fx.Node:
        self.modules.put(str(node.target), build, settings, dtype_at([*place.inputs, node]))
        self._note("replace", place.id)
        self._infer_new(node)
        return node

    def _create(
        self, name: str, build: Build, inputs: Sequence[fx.Node], settings: dict[str, Any], at: fx.Node | None = None
    ) -> fx.Node:
        self._check_name(name)
        path = self.modules.put(name, build, settings, dtype_at([*inputs, *([at] if at else [])]))
        with self.graph.inserting_before(at) if at else self.graph.inserting_after(last_of(self.graph, inputs)):
            node = self.graph.create_node("call_module", path, tuple(inputs))
        return self._created(node, name)

    def _created(self, node: fx.Node, name: str) -> fx.Node:
        node.meta |= {ID: name, OWNER: "", BLOCKS: self._blocks}
        self._note("create", name, is_rewired=True)
        self._infer_new(node)
        return node

    def _check_name(self, name: str) -> None:
        """Refuse the id of a new node that another node or a module has, or that is no name.

        Raises:
            ConfigError: with the id.
            InfeasibleModelError: there is no room for one node more.
        """
        is_right = name.isidentifier() and not self._is_used(name)
        expected = "a name of letters, digits and '_' that no node or module has"
        require(is_right, "id of a new node", name, expected, "Give the mutator another name.")
        self.check_room()

    def _is_used(self, name: str) -> bool:
        return self.modules.has(name) or any(node_id(node) == name for node in self.graph.nodes)

    def _erase(self, place: Place) -> None:
        for node in reversed(place.nodes):
            if not node.users:
                self.graph.erase_node(node)

    def _let_read(self, readers: list[fx.Node], before: fx.Node, source: fx.Node) -> None:
        """Let the readers of a node read another one in its place."""
        for reader in readers:
            reader.replace_input_with(before, source)
        self._reads_other(readers)

    def _note(self, operation: str, name: str, *, is_rewired: bool = False) -> None:
        self.changes.append(Change(self._mutator, operation, name))
        self.is_rewired |= is_rewired

    def _reads_other(self, nodes: Iterable[fx.Node]) -> None:
        """Take note of nodes that read something else than before, or call something else."""
        for node in nodes:
            heapq.heappush(self._waiting, node)

    def _update(self, until: fx.Node | None = None) -> None:
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
                self._shapes.infer_node(node, self.root)
            except ConfigError:
                continue
            if node.meta.get(GIVEN) is not before:
                self._reads_other(node.users)

    def _infer(self) -> None:
        """Compute all shapes.

        Raises:
            InfeasibleModelError: a node does not take what it is given, or stretches it.
        """
        self._waiting.clear()
        self._shapes.infer(self.graph, self.root)

    def _infer_new(self, node: fx.Node) -> None:
        """Compute the shape of a node that calls a new module.

        Raises:
            InfeasibleModelError: it does not take what it is given, or changes it.
        """
        for source in node.all_input_nodes:
            self._update(source)
        self._shapes.infer_node(node, self.root)
        for source in node.meta[CHANGED]:
            fault = (
                f"node '{node_id(node)}' changes in place what '{node_id(source)}' returns, which other nodes may read"
            )
            raise InfeasibleModelError(f"{fault}. Take a candidate that returns a new tensor, as x.relu() does.")
        self._reads_other(node.users)

    def _shape(self, node: fx.Node) -> Size | None:
        """Return the shape of what a node returns now, without the batch; None where that is no tensor."""
        self._update(node)
        return shape_of(node)

    def _settings_at(self, place: Place) -> dict[str, Any]:
        """Return what a module at a place would be made with (see `settings_of`), as others have left the place."""
        after = self._shape(place.nodes[-1])
        before = self._shape(place.inputs[0]) if place.inputs else None
        settings = settings_of(place.module, before, after)
        if before and not all(self._shapes.is_computed(node, self.root) for node in place.nodes):
            # What stands there was made for the sizes that it was given before.
            settings |= input_sizes(before)
        return settings


def _known_of_copy(node: fx.Node, name: str, around: Iterable[str]) -> dict[str, Any]:
    """Return what the copy of a node is known to be: with the names that it has in the copy."""

    def within(path: str) -> str:
        return f"{name}.{path}" if path else name

    blocks = {*map(within, node.meta.get(BLOCKS, ())), *around}
    known = {ID: f"{name}.{node_id(node)}", OWNER: within(node.meta[OWNER]), BLOCKS: tuple(sorted(blocks))}
    if CALLS in node.meta:
        known[CALLS] = tuple(map(within, node.meta[CALLS]))
    # What the node returns, the copy does, until its own shape is computed.
    return known | {key: node.meta[key] for key in (STRETCHED, VALUE) if key in node.meta}


def unread(graph: fx.Graph) -> set[str]:
    """Return the ids of the nodes whose results no other node reads."""
    return {node_id(node) for node in graph.nodes if node.op != "output" and not node.users}


def remove_unread(graph: fx.Graph, kept: set[str]) -> None:
    """Take out nodes that nobody reads any more; inputs stay, and those of some ids, which nobody has read before."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users and node_id(node) not in kept:
            graph.erase_node(node)
