"""A problem `w` below a problem `u` that shapes it by its loss and reads it."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from torch import nn

from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule


def ticked(program: Program, num_ticks: int) -> Program:
    """Return a program after some ticks of a new schedule."""
    schedule = Schedule(program)
    for _ in range(num_ticks):
        schedule.tick()
    return program


def two_levels(
    lower: tuple[nn.Module, Callable[..., Any]],
    upper: tuple[nn.Module, Callable[..., Any]],
    hypergradient: AbstractHypergradient | None,
    *,
    of_upper: Mapping[str, Any] = {},
    of_program: Mapping[str, Any] = {},
    **settings: Any,
) -> Program:
    """Return it, from a module and a loss each; the upper loss reads `w`, and itself if it has an argument `u`."""
    roles = {"w": "w", "u": "u"}
    of_top = {name: name for name in roles if name in signature(upper[1]).parameters}
    low = Problem("w", *lower, roles=roles, hypergradient=hypergradient, **settings)
    return Program(
        [low, Problem("u", *upper, roles=of_top, **of_upper)], Graph({"u": ["w"]}, {"w": ["u"]}), **of_program
    )
