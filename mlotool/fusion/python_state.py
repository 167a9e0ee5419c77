"""Whether what a trace has fixed, Python's numbers, is what it was."""

from collections.abc import Sequence
from typing import Any

from mlotool.program import Program
from mlotool.program.python_places import Place, is_watched, places
from mlotool.program.python_state import copied, is_same

CHANGED = "{place} has changed, which a trace has fixed"


class PythonWatch:
    """Sees whether numbers, texts and small containers of several programs are what they were when it was made.

    A trace holds them fixed, while a scheduler or a callback may change them between two ticks. A look takes 50 ns for
    each of them; there are none but in code of the user's.

    Args:
        programs: the members; None has left.
    """

    def __init__(self, programs: Sequence[Program | None]) -> None:
        self._kept: list[list[tuple[Any, str, Any, Place]]] = []
        seen: set[tuple[int, str]] = set()
        for program in programs:
            # A global that several read is looked at once, while the first of them is there.
            found = (
                [] if program is None else [each for each in places(program.engine.problems) if is_watched(each.value)]
            )
            new = [each for each in found if (id(each.holder), each.key) not in seen]
            seen |= {(id(each.holder), each.key) for each in new}
            self._kept.append([(each.holder, each.key, copied(each.value), each) for each in new])

    def drop(self, number: int) -> None:
        """Forget a member that has left."""
        self._kept[number] = []

    def change(self) -> str | None:
        """Return what has changed, as the end of a sentence."""
        for member in self._kept:
            for holder, key, value, place in member:
                now = holder.get(key)
                if now is not value and not is_same(now, value):
                    return CHANGED.format(place=place.owner)
        return None
