"""What the program of a stack was made for, beside what can be seen in the members that are left."""

from dataclasses import dataclass, field


@dataclass
class Layout:
    """What is kept of the program of some lanes, so that a sweep that goes on makes the same one.

    Members that have left meanwhile had their part in it.

    Args:
        shares: by problem, whether all members have the same samples.
        own_values: the keys of numbers and frozen parameters in which they differ.
        courses: by round and kind of its batches, how solvers decided when it was traced; empty where nothing was to
            be decided.
    """

    shares: dict[str, bool] = field(default_factory=dict)
    own_values: tuple[str, ...] = ()
    courses: dict[str, tuple[bool, ...]] = field(default_factory=dict)
