"""Which problems step in a tick, and in which rounds: lists that are made once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from mlotool.problem.settings import ProblemSettings
from mlotool.program.graph import Graph


def ticks_per_step(settings: Mapping[str, ProblemSettings], graph: Graph) -> dict[str, int]:
    """Return, by problem, the ticks from one step to the next, warm-up aside; `settings` are by problem."""

    @cache
    def ticks(name: str) -> int:
        return max([ticks(lower) * settings[lower].unroll_steps for lower in graph.lowers(name)], default=1)

    return {name: ticks(name) for name in settings}


def takes_several_steps(name: str, settings: Mapping[str, ProblemSettings], graph: Graph) -> bool:
    """Return whether a problem may take more than one step before one that reads it does."""
    ticks = ticks_per_step(settings, graph)
    siblings = {name, *(lower for reader in graph.readers(name) for lower in graph.lowers(reader))}
    return any(
        ticks[each] * settings[each].unroll_steps > ticks[name] or (each != name and settings[each].warmup_steps > 0)
        for each in siblings
    )


@dataclass(frozen=True, slots=True)
class Order:
    """One kind of tick.

    Args:
        rounds: problems that step together, round after round; each problem is in one of them at most.
        waited: afterwards, by edge of `TickOrder.edges`, the lower problem's steps since the upper one's last, up to
            its `unroll_steps`.
    """

    rounds: tuple[tuple[str, ...], ...]
    waited: tuple[int, ...]


class TickOrder:
    """Tells the rounds of a tick from how long each problem has waited for those that it reads.

    Every leaf problem (one that reads no other) is in the first round; a problem above is in the round after the one in
    which the last problem that it reads has taken its `unroll_steps`.

    Args:
        settings: by problem.
        graph: the edges between them.

    Attributes:
        edges: pairs of an upper problem and a lower one that it reads.
        start: `waited` before the first tick, one count an edge.

    Example:
        A classifier that takes two steps for one of its weights::

            order = TickOrder(settings, graph)
            order(order.start, frozenset())      # rounds (("classifier",),), waited (1,)
            order((1,), frozenset())             # rounds (("classifier",), ("weights",)), waited (0,)
    """

    def __init__(self, settings: Mapping[str, ProblemSettings], graph: Graph) -> None:
        self._settings = settings
        self._leaves = tuple(graph.leaves(settings))
        self._lowers = {name: tuple(graph.lowers(name)) for name in settings if graph.lowers(name)}
        self.edges = tuple((upper, lower) for upper, lowers in self._lowers.items() for lower in lowers)
        self.start = (0,) * len(self.edges)
        self._known: dict[tuple[tuple[int, ...], frozenset[str]], Order] = {}

    def __call__(self, waited: tuple[int, ...], warming_up: frozenset[str]) -> Order:
        """Return a tick's rounds.

        Args:
            waited: one count an edge, as `Order.waited` has them.
            warming_up: problems whose step of this tick does not count for those above.
        """
        key = waited, warming_up
        if key not in self._known:
            counts = dict(zip(self.edges, waited, strict=True))
            rounds = tuple(self._rounds(counts, warming_up))
            self._known[key] = Order(rounds, tuple(counts.values()))
        return self._known[key]

    def _rounds(self, waited: dict[tuple[str, str], int], warming_up: frozenset[str]) -> Iterator[tuple[str, ...]]:
        """Yield the rounds; the counts move along."""
        due, stepped = self._leaves, set[str]()
        while due:
            yield due
            stepped.update(due)
            for name in due:
                for lower in self._lowers.get(name, ()):
                    waited[name, lower] = 0
                for edge in self.edges if name not in warming_up else ():
                    if edge[1] == name:
                        # No more than counts: so there are few kinds of ticks.
                        waited[edge] = min(waited[edge] + 1, self._settings[name].unroll_steps)
            late = {upper for (upper, lower), count in waited.items() if count < self._settings[lower].unroll_steps}
            due = tuple(name for name in self._lowers if name not in stepped | late)
