"""How often each problem steps. No torch."""

from collections.abc import Mapping
from typing import Protocol

from mlotool.program.graph import Graph


class StepSettings(Protocol):
    """The settings that the rate of a problem's steps depends on."""

    @property
    def unroll_steps(self) -> int:
        """Optimizer steps before the problems that read it step."""

    @property
    def warmup_steps(self) -> int:
        """Its first steps, which do not count for the problems above."""


def ticks_per_step(settings: Mapping[str, StepSettings], graph: Graph) -> dict[str, int]:
    """Return, by problem, the ticks from one step to the next, warm-up aside; `settings` are by problem."""
    found: dict[str, int] = {}

    def ticks(name: str) -> int:
        if name not in found:
            below = [ticks(lower) * settings[lower].unroll_steps for lower in graph.lowers(name)]
            found[name] = max(below, default=1)
        return found[name]

    return {name: ticks(name) for name in settings}


def takes_several_steps(name: str, settings: Mapping[str, StepSettings], graph: Graph) -> bool:
    """Return whether a problem may take more than one step before one that reads it does."""
    ticks = ticks_per_step(settings, graph)
    siblings = {name, *(lower for reader in graph.readers(name) for lower in graph.lowers(reader))}
    return any(
        ticks[each] * settings[each].unroll_steps > ticks[name] or (each != name and settings[each].warmup_steps > 0)
        for each in siblings
    )
