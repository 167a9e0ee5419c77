"""How many nodes a model may get, and which names are left for them."""

from torch import fx

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.core.messages import shown
from mlotool.spaces.building import NewModules
from mlotool.spaces.targets import node_id

MAX_NEW_NODES = 2_000
"""A model to which mutators add more is refused, before it takes minutes and all memory."""


class Room:
    """What is left of a graph for new nodes.

    Args:
        graph: of the base.
        modules: of the model.
    """

    def __init__(self, graph: fx.Graph, modules: NewModules) -> None:
        self._graph, self._modules = graph, modules
        self._most = len(graph.nodes) + MAX_NEW_NODES

    def check(self, num_nodes: int = 1) -> None:
        """Refuse more new nodes than a model may have.

        Raises:
            InfeasibleModelError: there is no room for so many.
        """
        if len(self._graph.nodes) + num_nodes > self._most:
            raise InfeasibleModelError(
                f"found {MAX_NEW_NODES:,} nodes more than the base has; expected less. Correct candidates or counts."
            )

    def check_name(self, name: str) -> None:
        """Refuse the id of a new node that another node or a module has, or that is no name.

        Raises:
            ConfigError: with the id.
            InfeasibleModelError: there is no room for one node more.
        """
        if self._is_taken(name) or not name.isidentifier():
            raise ConfigError(
                f"found the id {shown(name)} of a new node; expected one that no node or module has, of "
                "letters, digits and '_'. Give the mutator another name."
            )
        self.check()

    def _is_taken(self, name: str) -> bool:
        return self._modules.has(name) or any(node_id(each) == name for each in self._graph.nodes)
