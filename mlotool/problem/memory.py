"""What an algorithm keeps from one pullback to the next, apart from its settings."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Memory:
    """Holds what an algorithm keeps for one problem; there is one for each problem of a program.

    The settings of an algorithm never change, so one object of them may serve several problems and programs. What does
    change is the value here. An algorithm reads it, computes, and puts a new value in its place; it changes none.

    Args:
        value: what is kept, as `AbstractHypergradient.initial_state` and `load_state` return it.
    """

    value: Any = None
