"""A module's forward as a graph of its layers and blocks."""

from collections.abc import Iterable

from torch import fx, nn

from mlotool.core.errors import ConfigError


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Blocks are leaves: what they do inside need not be traceable, and is not for a cut."""
        if super().is_leaf_module(m, module_qualified_name):
            return True
        assert isinstance(self.root, nn.Module)
        parent = self.root.get_submodule(module_qualified_name.rpartition(".")[0])
        return isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict) and not isinstance(m, nn.Sequential)


def traced(module: nn.Module, key: str) -> fx.Graph:
    """Return the operations of a module's forward, with blocks and torch's own layers as black boxes.

    Args:
        module: children of a Sequential, ModuleList or ModuleDict are blocks.
        key: of the module, for messages.

    Raises:
        ConfigError: it cannot be traced.

    Example:
        >>> [node.op for node in traced(nn.Sequential(nn.Flatten(), nn.ReLU()), "module").nodes]
        ['placeholder', 'call_module', 'call_module', 'output']
    """
    try:
        graph = _Tracer().trace(module)
        open_ended = [str(node.target) for node in graph.nodes if node.op == "placeholder" and "*" in str(node.target)]
        if open_ended:
            raise TypeError(f"forward takes {', '.join(open_ended)}")
    except Exception as error:  # tracing runs the user's forward on stand-ins, which may fail in any way
        raise ConfigError(
            f"{key}: the forward of {type(module).__name__} cannot be traced ({str(error).splitlines()[0]}); expected "
            "one whose steps depend on no value, but inside its blocks. Write it as an nn.Sequential of blocks, or "
            "with its blocks in an nn.ModuleList."
        ) from error
    return graph


def recomputed(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the values that follow from the inputs without a layer, a parameter or a random number.

    Args:
        nodes: operations of a traced forward, in their order.

    Example:
        >>> class Scaled(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(2, 2)
        ...     def forward(self, x, mask):
        ...         return self.layer(x) * (1 - mask)
        >>> sorted(node.name for node in recomputed(traced(Scaled(), "module").nodes))
        ['sub']
    """
    found: set[fx.Node] = set()
    for node in nodes:
        is_plain = node.op in ("call_function", "call_method") and "drop" not in node.name and "rand" not in node.name
        if is_plain and all(each.op == "placeholder" or each in found for each in node.all_input_nodes):
            found.add(node)
    return found
