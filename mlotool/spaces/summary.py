"""What a graph consists of, for people: no tensors, no torch.fx."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from torch import fx, nn

from mlotool.spaces.model_graph import Change
from mlotool.spaces.shapes import shape_of
from mlotool.spaces.shared.super_graph import sources_of, switch_of
from mlotool.spaces.tracing import kind_of, node_id


@dataclass(frozen=True)
class NodeSummary:
    """A node of a model's graph.

    Args:
        id: its id.
        kind: class of its module, or name of its function.
        inputs: ids of the nodes that it reads.
        shape: of its result, without the batch; None where that is no tensor, or not known.
        mutator: name of the last mutator that has made or changed it; None: it is the base's.
        stands_for: of a shared space, the decisions and their candidates whose result it is.
    """

    id: str
    kind: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...] | None
    mutator: str | None
    stands_for: tuple[tuple[str, str], ...] = ()


def summaries(graph: fx.Graph, root: nn.Module, changes: Sequence[Change]) -> tuple[NodeSummary, ...]:
    """Return the nodes of a graph, in the order in which they are computed.

    Candidates of a shared space that have one id are told apart as their parameters are: `conv`, `conv@k5`.
    """
    changed = {change.node: change.mutator for change in changes}
    candidates = _candidates(graph)
    ids = _different_ids(graph, candidates)
    nodes = []
    for node in graph.nodes:
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        shape, name = shape_of(node), node_id(node)
        mutator = changed.get(name, changed.get(name.partition(".")[0]))
        inputs, size = tuple(ids[source] for source in node.all_input_nodes), None if shape is None else tuple(shape)
        stands_for = tuple(candidates.get(node, ()))
        nodes.append(NodeSummary(ids[node], kind_of(node, module), inputs, size, mutator, stands_for))
    return tuple(nodes)


def nodes_of_spaces(module: nn.Module) -> tuple[NodeSummary, ...]:
    """Return the nodes of a module that is a space, or of the spaces in it, whose ids then begin with their paths.

    Example:
        >>> nodes_of_spaces(nn.Linear(2, 2))
        ()
    """
    own = vars(module).get("nodes")
    if isinstance(own, tuple) and all(isinstance(node, NodeSummary) for node in own):
        return own
    return tuple(
        replace(node, id=f"{name}.{node.id}", inputs=tuple(f"{name}.{source}" for source in node.inputs))
        for name, child in module.named_children()
        for node in nodes_of_spaces(child)
    )


def _candidates(graph: fx.Graph) -> dict[fx.Node, list[tuple[str, str]]]:
    """Return, by node, the decisions and candidates that it stands for."""
    candidates: dict[fx.Node, list[tuple[str, str]]] = {}
    for node in graph.nodes:
        switch = switch_of(node)
        if switch is not None:
            for value, source in zip(switch.values, sources_of(node), strict=True):
                candidates.setdefault(source, []).append((switch.decision, str(value)))
    return candidates


def _different_ids(graph: fx.Graph, candidates: Mapping[fx.Node, Sequence[tuple[str, str]]]) -> dict[fx.Node, str]:
    ids: dict[fx.Node, str] = {}
    used: set[str] = set()
    for node in graph.nodes:
        name, switch = node_id(node), switch_of(node)
        if name in used and switch is not None:
            name = f"{name}:{switch.__name__}"
        elif name in used and node in candidates:
            name = f"{name}@{candidates[node][0][1]}"
        names = chain([name], (f"{name}#{number}" for number in count(2)))
        ids[node] = next(name for name in names if name not in used)
        used.add(ids[node])
    return ids
