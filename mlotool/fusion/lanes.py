"""Which members have a lane of a stack at which tick."""

from collections.abc import Iterable, Mapping, Sequence


class Lanes:
    """The lanes of members of equal structure.

    A member that leaves keeps its lane, which nobody reads any more, until at most half of the lanes are in use; then
    those that are left get lanes of their own, from the second tick after its last one on: the first one it may have
    begun. So which lanes there are at a tick depends on nothing but the ticks at which members have left: a sweep that
    was killed and goes on has the same, and computes the same bits.

    Args:
        members: their numbers, in order.
        ends: by member that has left, its last tick; more come while members leave.

    Example:
        >>> lanes = Lanes([0, 1, 2, 3], {})
        >>> lanes.at(10)
        (0, 1, 2, 3)
        >>> lanes.leave(1, 20), lanes.at(20), lanes.leave(3, 30), lanes.at(25), lanes.at(30)
        (None, (0, 1, 2, 3), None, (0, 1, 2, 3), (0, 1, 2, 3))
        >>> lanes.at(31)
        (0, 2)
    """

    def __init__(self, members: Sequence[int], ends: Mapping[int, int]) -> None:
        self._members = tuple(members)
        self._ends = {member: ends[member] for member in members if member in ends}

    def leave(self, member: int, tick: int) -> None:
        """Take note that a member has left.

        Args:
            member: its number.
            tick: its last one; one that left before its first tick never had a lane.
        """
        self._ends[member] = tick

    def at(self, tick: int) -> tuple[int, ...]:
        """Return the members that have a lane in the tick after `tick`."""
        lanes = self._those_after(self._members, 0)
        for end in sorted(set(self._ends.values())):
            left = self._those_after(lanes, end)
            if end < tick and 2 * len(left) <= len(lanes):
                lanes = left
        return lanes

    def _those_after(self, members: Iterable[int], tick: int) -> tuple[int, ...]:
        return tuple(each for each in members if each not in self._ends or self._ends[each] > tick)
