"""A node of a shared space that stands for one of several others."""

from collections.abc import Sequence

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from mlotool.spaces.decisions import Value


class Switch:
    """Stands for one of several nodes, as a decision says.

    Args:
        decision: its name.
        values: the candidates that the nodes stand for, in their order.
    """

    __name__ = "choice"

    def __init__(self, decision: str, values: Sequence[Value]) -> None:
        self.decision, self.values = decision, tuple(values)

    def __call__(self, results: Sequence[object]) -> object:
        """Return the first result, for shapes: all are alike.

        Raises:
            ValueError: they are not.
        """
        kinds = [str(pytree.tree_map_only(Tensor, _kind, each)) for each in results]
        for value, kind in zip(self.values, kinds, strict=True):
            if kind != kinds[0]:
                raise ValueError(
                    f"the candidates of '{self.decision}' return different shapes, {self.values[0]} {kinds[0]} and "
                    f"{value} {kind}"
                )
        return results[0]


def switch_of(node: fx.Node) -> Switch | None:
    """Return what a node stands for; None where it is another one."""
    return node.target if isinstance(node.target, Switch) else None


def sources_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a switch stands for, one a candidate."""
    [sources] = node.args
    assert isinstance(sources, Sequence)
    return [each for each in sources if isinstance(each, fx.Node)]


def _kind(value: Tensor) -> str:
    return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
