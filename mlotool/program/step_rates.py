"""How often each problem steps. No torch."""

from collections.abc import Mapping
from typing import Protocol

from mlotool.program.graph import Graph


class Paced(Protocol):
    """What the pace of a problem depends on."""

    unroll_steps: int
    warmup_steps: int


def ticks_per_step(problems: Mapping[str, Paced], graph: Graph) -> dict[str, int]:
    """Return, by problem, the ticks from one step to the next, warm-up aside."""
    found: dict[str, int] = {}

    def ticks(name: str) -> int:
        if name not in found:
            below = [ticks(lower) * problems[lower].unroll_steps for lower in graph.lowers(name)]
            found[name] = max(below, default=1)
        return found[name]

    return {name: ticks(name) for name in problems}


def takes_several_steps(name: str, problems: Mapping[str, Paced], graph: Graph) -> bool:
    """Return whether a problem may take more than one step before one that reads it does."""
    ticks = ticks_per_step(problems, graph)
    siblings = {name, *(lower for reader in graph.readers(name) for lower in graph.lowers(reader))}
    return any(
        ticks[each] * problems[each].unroll_steps > ticks[name] or (each != name and problems[each].warmup_steps > 0)
        for each in siblings
    )
