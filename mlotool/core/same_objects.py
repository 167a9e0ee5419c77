"""Whether objects that somebody else holds are still those that were there before."""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any


class SameObjects:
    """Remembers the objects that a function has found, and says later whether it finds the same ones again.

    Args:
        look: returns them; numbers count as the same only if they are the same object.

    Example:
        >>> settings = {"rate": 0.1}
        >>> same = SameObjects(lambda: list(settings.values()))
        >>> same(), settings.update(rate=0.2), same()
        (True, None, False)
    """

    __slots__ = ("_kept", "_look")

    def __init__(self, look: Callable[[], Sequence[Any]]) -> None:
        self._look = look
        self._kept = look()

    def __call__(self) -> bool:
        """Say whether they are the same."""
        now, kept = self._look(), self._kept
        return len(now) == len(kept) and all(map(is_, now, kept))

    def renew(self) -> None:
        """Remember those that are there now."""
        self._kept = self._look()
