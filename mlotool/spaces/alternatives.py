"""What a mutator decides: one candidate of several; in a shared space, all of them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

from torch import fx

from mlotool.spaces.decisions import Value, choose

V = TypeVar("V", bound=Value)


class Alternatives:
    """Decides for mutators.

    Attributes:
        is_shared: whether a graph holds all models of a space at once (see `SharedSpace`).
    """

    is_shared: ClassVar[bool] = False

    def __init__(self) -> None:
        self._decided: dict[str, Any] = {}

    def alternatives(self, name: str, candidates: Iterable[V]) -> Iterator[V]:
        """Yield the candidate that is decided; in a shared space each of them, one after the other.

        What the body of the loop does to the graph is what the candidate means. A mutator that decides by
        `alternatives`, and not by `choose`, works in shared spaces too.

        Args:
            name: of the decision; asked again by the same mutator, it has the same answer.
            candidates: names or whole numbers.
        """
        if name not in self._decided:
            self._decided[name] = choose(name, tuple(candidates))
        yield self._decided[name]

    def select(self, name: str, candidates: Iterable[V], make: Callable[[V], fx.Node]) -> fx.Node:
        """Return the node that is made for the candidate that is decided; in a shared space, a choice between all.

        Args:
            name: of the decision.
            candidates: names or whole numbers.
            make: makes a node for one of them, or finds it.
        """
        [node] = [make(value) for value in self.alternatives(name, candidates)]
        return node

    def forget(self) -> None:
        """Begin with another mutator, whose decisions have names of their own."""
        self._decided = {}
