"""Operations that change a tensor which other nodes may read: a graph does not say in which order they do."""

from collections.abc import Iterable
from os.path import commonpath

from torch import fx, nn

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.spaces.shapes import EFFECT, GIVEN, Effect, operands
from mlotool.spaces.tracing import WHOLE, forward_of, node_id


def without_in_place(graph: fx.Graph, root: nn.Module) -> None:
    """Let layers and functions with `inplace=True` return new tensors, of the same values.

    Other operations that change what they read stay (`x.relu_()`). What reads their operand later, and so
    finds it changed, then reads their result.

    Args:
        graph: of the model, whose shapes are known.
        root: the model; its layers' `inplace` becomes false.

    Raises:
        ConfigError: an operation changes what is read afterwards under another name, as a view of it.
    """
    memory = _Memory(graph)
    for node in graph.nodes:
        source = changed(node, root)
        if source is not None:
            for reader in list(source.users):
                if memory.order[reader] > memory.order[node]:
                    reader.replace_input_with(source, node)
        if conflict := memory.conflict(node, {*changed_operands(node), *([source] if source else [])}):
            around = commonpath([forward_of(each).replace(".", "/") for each in (node, *conflict)]).replace("/", ".")
            raise ConfigError(
                f"leaves: {_told(node, *conflict)} Write that, or leaves: ['{around or WHOLE}'], which makes one node "
                "of it."
            )
        if node.op == "call_module" and source is not None:
            layer = root.get_submodule(str(node.target))
            if hasattr(layer, "inplace"):
                layer.inplace = False  # type: ignore[assignment]
                del node.meta[GIVEN]
        elif node.kwargs.get("inplace") is True:
            node.kwargs = {**node.kwargs, "inplace": False}


def check_order(graph: fx.Graph) -> None:
    """Refuse a graph in which what a node changes in place is read afterwards under another name.

    Raises:
        InfeasibleModelError: with the nodes.
    """
    memory = _Memory(graph)
    for node in graph.nodes:
        if conflict := memory.conflict(node, changed_operands(node)):
            raise InfeasibleModelError(f"{_told(node, *conflict)} Correct the candidate, or write another path.")


def is_changed(graph: fx.Graph, node: fx.Node) -> bool:
    """Say whether an operation that comes later changes what a node returns."""
    changing = [each for each in graph.nodes if _effect(each).changed]
    if not changing:
        return False
    memory = _Memory(graph)
    later = (each for each in changing if memory.order[each] > memory.order[node])
    return any(not memory.shared[node].isdisjoint(changed_operands(each)) for each in later)


def changed(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """Return the node whose result an operation changes, and returns; None where it changes none."""
    is_in_place = False
    if node.op == "call_module":
        is_in_place = getattr(root.get_submodule(str(node.target)), "inplace", None) is True
    elif node.op in ("call_function", "call_method"):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        is_in_place = node.kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__"))
    first = node.args[0] if node.args else None
    is_in_place |= 0 in _effect(node).viewed & _effect(node).changed
    return first if isinstance(first, fx.Node) and is_in_place else None


def changed_operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose results the call of a node changes, as far as evaluation shows it."""
    return [operands(node)[position] for position in _effect(node).changed]


def check_changes_nothing(node: fx.Node) -> None:
    """Refuse a new module that changes what it is given.

    Raises:
        InfeasibleModelError: with its node.
    """
    for source in changed_operands(node):
        raise InfeasibleModelError(
            f"node '{node_id(node)}' changes in place what '{node_id(source)}' returns, which other nodes may read; "
            "expected a module that returns a new tensor, as x.relu() does. Correct the candidate."
        )


def unread(graph: fx.Graph) -> set[str]:
    """Return the ids of the nodes whose results no other node reads."""
    return {node_id(node) for node in graph.nodes if node.op != "output" and not node.users}


def remove_unread(graph: fx.Graph, root: nn.Module, kept: set[str]) -> None:
    """Take out nodes that nobody reads any more; inputs stay, and so does what changes a tensor in place.

    Args:
        graph: of the model.
        root: the model.
        kept: ids of nodes that stay: nobody has read them before, either.
    """
    for node in reversed(list(graph.nodes)):
        is_plain = node.op not in ("placeholder", "output") and changed(node, root) is None
        if is_plain and not node.users and node_id(node) not in kept:
            graph.erase_node(node)


class _Memory:
    """Which results have the same memory, and in which order nodes are computed."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: number for number, node in enumerate(graph.nodes)}
        self.shared: dict[fx.Node, set[fx.Node]] = {}
        for node in graph.nodes:
            inputs = operands(node)
            together = {node}.union(*(self.shared[inputs[position]] for position in _effect(node).viewed))
            self.shared |= dict.fromkeys(together, together)

    def conflict(self, node: fx.Node, sources: Iterable[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
        """Return a node whose result has the memory of those that a node changes, and who reads it afterwards."""
        for source in sources:
            for other in sorted(self.shared[source], key=self.order.__getitem__):
                for reader in other.users:
                    if self.order[other] < self.order[node] < self.order[reader]:
                        return other, reader
        return None


def _effect(node: fx.Node) -> Effect:
    effect = node.meta.get(EFFECT, Effect())
    assert isinstance(effect, Effect)
    return effect


def _told(node: fx.Node, other: fx.Node, reader: fx.Node) -> str:
    return (
        f"node '{node_id(node)}' changes in place what '{node_id(other)}' returns, which '{node_id(reader)}' reads "
        "afterwards; expected the result of the change where it is read, as x = x.relu()."
    )
