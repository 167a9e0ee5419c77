"""Fewer and cheaper calls for a traced graph, whose operations are pure but for the writes into buffers at its end."""

from typing import Any

import torch
from torch import Tensor
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import Graph, GraphModule, Node

_ATEN = torch.ops.aten
_IDENTITIES = {_ATEN.alias.default, _ATEN.detach.default}
_METHODS = {"view": Tensor.view, "expand": Tensor.expand, "t": Tensor.t, "clone": Tensor.clone}


def simplified(module: GraphModule) -> GraphModule:
    """Return a module of the same function with common subexpressions shared and identities left out.

    Args:
        module: of aten operations without autograd; steps in place are to be those of `functionalize`.
    """
    graph = module.graph
    _remove_identities(graph)
    graph.eliminate_dead_code()
    shared = fx_graph_cse(graph)
    _remove_identities(shared)
    shared.eliminate_dead_code()
    for node in shared.nodes:
        if node.op == "call_function":
            node.target = _direct(node.target)
    found = GraphModule(module, shared)
    found.recompile()
    return found


def _remove_identities(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            continue
        if node.target in _IDENTITIES:
            node.replace_all_uses_with(source)
        elif node.target is source.target is _ATEN.t.default:
            [twice, *_] = source.args
            assert isinstance(twice, Node)
            node.replace_all_uses_with(twice)


def _direct(target: Any) -> Any:
    """Return the Python binding of an aten operation: it parses its arguments in half the time."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return target
    name = target._schema.name.removeprefix("aten::")
    if name in _METHODS:
        return _METHODS[name]
    return getattr(torch._C._VariableFunctions, name, None) or getattr(torch._C._nn, name, None) or target
