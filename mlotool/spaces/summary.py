"""What a graph consists of, for people: no tensors, no torch.fx."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from torch import fx, nn

from mlotool.spaces.changes import Change
from mlotool.spaces.shapes import shape_of
from mlotool.spaces.shared.switch import sources_of, switch_of
from mlotool.spaces.targets import kind_of, node_id


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
    changed = {each.node: each.mutator for each in changes}
    candidates = _candidates(graph)
    ids = _different_ids(graph, candidates)
    found = []
    for node in graph.nodes:
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        shape, name = shape_of(node), node_id(node)
        found.append(
            NodeSummary(
                ids[node],
                kind_of(node, module),
                tuple(ids[each] for each in node.all_input_nodes),
                None if shape is None else tuple(shape),
                changed.get(name, changed.get(name.partition(".")[0])),
                tuple(candidates.get(node, ())),
            )
        )
    return tuple(found)


def nodes_of_spaces(module: nn.Module) -> tuple[NodeSummary, ...]:
    """Return the nodes of a module that is a space, or of the spaces in it, whose ids then begin with their paths.

    Example:
        >>> nodes_of_spaces(nn.Linear(2, 2))
        ()
    """
    found: list[NodeSummary] = []
    for path, nodes in _spaces(module, ""):
        names = {each.id: f"{path}.{each.id}" if path else each.id for each in nodes}
        found += [replace(each, id=names[each.id], inputs=tuple(names[one] for one in each.inputs)) for each in nodes]
    return tuple(found)


def _candidates(graph: fx.Graph) -> dict[fx.Node, list[tuple[str, str]]]:
    """Return, by node, the decisions and candidates that it stands for."""
    found: dict[fx.Node, list[tuple[str, str]]] = {}
    for node in graph.nodes:
        switch = switch_of(node)
        if switch is not None:
            for value, source in zip(switch.values, sources_of(node), strict=True):
                found.setdefault(source, []).append((switch.decision, str(value)))
    return found


def _different_ids(graph: fx.Graph, candidates: Mapping[fx.Node, Sequence[tuple[str, str]]]) -> dict[fx.Node, str]:
    ids: dict[fx.Node, str] = {}
    taken: set[str] = set()
    for node in graph.nodes:
        name = node_id(node)
        switch = switch_of(node)
        if name in taken and switch is not None:
            name = f"{name}:{switch.__name__}"
        elif name in taken and node in candidates:
            name = f"{name}@{candidates[node][0][1]}"
        numbered = (f"{name}#{number}" for number in count(2))
        ids[node] = next(each for each in chain([name], numbered) if each not in taken)
        taken.add(ids[node])
    return ids


def _spaces(module: nn.Module, path: str) -> Iterator[tuple[str, tuple[NodeSummary, ...]]]:
    nodes = vars(module).get("nodes")
    if isinstance(nodes, tuple) and all(isinstance(each, NodeSummary) for each in nodes):
        yield path, nodes
        return
    for name, child in module.named_children():
        yield from _spaces(child, f"{path}.{name}" if path else name)
