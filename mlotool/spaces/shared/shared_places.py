"""The places of a shared graph: those that all of its models have."""

from collections.abc import Iterator

from torch import fx

from mlotool.core.errors import ConfigError
from mlotool.spaces.places import Places
from mlotool.spaces.shared.shared_modules import MARK
from mlotool.spaces.shared.switch import sources_of, switch_of
from mlotool.spaces.targets import Place, Target, node_id


class SharedPlaces(Places):
    """Finds what targets describe, in a graph that holds all models of a space.

    What stands for one of several modules of one id is a place of this id, if all of them are as described.
    """

    def every(self) -> Iterator[Place]:
        """Yield each node as a place, then each module of the base whose forward is several nodes."""
        return (each for each in super().every() if MARK not in each.id)

    def _fitting(self, target: Target, of_some: bool) -> Iterator[Place]:
        computed = always_computed(self._graph)
        choices = {node_id(each): each for each in self._graph.nodes if switch_of(each) is not None}
        chosen: dict[str, list[fx.Node]] = {}
        for place in super()._fitting(target, of_some):
            last = place.nodes[-1]
            if switch_of(last) is not None and len(place.nodes) == 1:
                continue
            if len(place.nodes) == 1 and place.id in choices:
                chosen.setdefault(place.id, []).append(last)
            elif of_some or last in computed:
                yield place
            else:
                raise _refusal(place.id)
        for name, nodes in chosen.items():
            members = [each for each in self._graph.nodes if node_id(each) == name and each is not choices[name]]
            if set(members) != set(nodes) or not (of_some or choices[name] in computed):
                raise _refusal(name)
            yield self._place(name, (*members, choices[name]), None)


def always_computed(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that every model of a shared graph computes, whatever was decided."""
    needed: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if switch_of(node) is not None and node.args:
            below = frozenset.intersection(*(needed[each] for each in sources_of(node)))
        else:
            below = frozenset[fx.Node]().union(*(needed[each] for each in node.all_input_nodes))
        needed[node] = below | {node}
    return set(needed[next(iter(reversed(graph.nodes)))])


def _refusal(name: str) -> ConfigError:
    return ConfigError(
        f"at: found '{name}', which only some models of the space have, or which is as described in some of them "
        "alone; expected places that all models of a shared space have. Name places by their paths, or let this "
        "mutator come before the one that decides about it."
    )
