"""Nodes once more behind themselves: what they know of the model, their copies know of the copy."""

from typing import Any

from torch import fx, nn

from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces.new_modules import NewModules
from mlotool.spaces.places import blocks_of
from mlotool.spaces.shapes import EFFECT, STRETCHED, VALUE
from mlotool.spaces.targets import Place, node_id
from mlotool.spaces.tracing import BLOCKS, CALLS, ID, OWNER


def put_copies(graph: fx.Graph, root: nn.Module, modules: NewModules, place: Place, name: str) -> list[fx.Node]:
    """Put the nodes of a place once more behind its last one, where nobody reads them yet.

    Args:
        graph: of the model.
        root: the model.
        modules: makes the copies' modules.
        place: with one input.
        name: begins the ids of the copies, and is the path of their modules.

    Returns:
        the copies, in their order; that of the place's last node is the last.

    Raises:
        ConfigError: a module cannot be made once more.
        InfeasibleModelError: the place reads a parameter or buffer that is outside of its layers.
    """
    [source] = place.inputs
    after, around = place.nodes[-1], blocks_of(place)
    copies: dict[fx.Node, fx.Node] = {source: after}
    for node in place.nodes:
        with graph.inserting_after(after):
            copy = graph.node_copy(node, lambda each: copies.get(each, each))
        if node.op in ("call_module", "get_attr"):
            path = str(node.target)
            copy.target = f"{name}.{path}"
            if node.op == "get_attr":
                _check_mode(place, node, root)
            elif not modules.has(copy.target):
                modules.put_once_more(path, name)
                if hasattr(layer := root.get_submodule(path), "inplace"):
                    root.get_submodule(copy.target).inplace = layer.inplace
        inside = {_within(name, each) for each in node.meta.get(BLOCKS, ())}
        copy.meta = _known(node, name) | {BLOCKS: tuple(sorted(inside.union(around)))}
        copies[node] = after = copy
    for node in place.nodes:
        # Behind all layers: one whose mode is read may be called itself.
        if node.op == "get_attr":
            modules.hold(str(node.target), name)
    return [copies[node] for node in place.nodes]


def _known(node: fx.Node, name: str) -> dict[str, Any]:
    """Return what the copy of a node is known to be: with the names that it has in the copy."""
    known: dict[str, Any] = {ID: f"{name}.{node_id(node)}", OWNER: _within(name, node.meta[OWNER])}
    if CALLS in node.meta:
        known[CALLS] = tuple(_within(name, call) for call in node.meta[CALLS])
    # What the node returns, the copy does, until its own shape is computed.
    return known | {key: node.meta[key] for key in (STRETCHED, VALUE, EFFECT) if key in node.meta}


def _within(name: str, path: str) -> str:
    return f"{name}.{path}" if path else name


def _check_mode(place: Place, node: fx.Node, root: nn.Module) -> None:
    """Refuse a tensor that a place holds itself; a copy's mode is that of its own module."""
    above, _, last = str(node.target).rpartition(".")
    if last != "training" or type(getattr(root.get_submodule(above), last)) is not bool:
        raise InfeasibleModelError(
            f"'{place.id}' holds '{node_id(node)}', which cannot be had once more; expected modules that hold their "
            f"own parameters. Declare it as a leaf: leaves: ['{place.id}']."
        )
