"""Operations that change a tensor which other nodes may read: a graph does not say in which order they do."""

from torch import fx, nn


def without_in_place(graph: fx.Graph, root: nn.Module) -> None:
    """Let layers and functions with `inplace=True` return new tensors, of the same values.

    Other operations that change what they read stay (`x.relu_()`). What reads their operand later, and so
    finds it changed, then reads their result.

    Args:
        graph: of the model.
        root: the model; its layers' `inplace` becomes false.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        source = changed(node, root)
        if source is None:
            continue
        for reader in list(source.users):
            if order[reader] > order[node]:
                reader.replace_input_with(source, node)
        if node.op == "call_module":
            root.get_submodule(str(node.target)).inplace = False  # type: ignore[assignment]
        elif node.kwargs.get("inplace") is True:
            node.kwargs = {**node.kwargs, "inplace": False}


def is_changed(node: fx.Node, root: nn.Module) -> bool:
    """Say whether an operation changes what a node returns."""
    return any(changed(reader, root) is node for reader in node.users)


def changed(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """Return the node whose result an operation changes; None where it changes none."""
    if node.op == "call_module":
        is_in_place = getattr(root.get_submodule(str(node.target)), "inplace", None) is True
    elif node.op in ("call_function", "call_method"):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        is_in_place = node.kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__"))
    else:
        is_in_place = False
    first = node.args[0] if node.args else None
    return first if is_in_place and isinstance(first, fx.Node) else None
