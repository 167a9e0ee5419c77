"""How layers are solved by multigrid: of one solve, and of a module's training steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from mlotool.core.arguments import is_number
from mlotool.core.errors import ConfigError
from mlotool.layerparallel.multigrid.grids import check_names


@dataclass(frozen=True)
class Method:
    """How the layers are coarsened, and how often.

    Args:
        coarsening: c, one factor for all levels, or one from each level to the next.
        levels: at most so many, the finest included (2: two grids); None for all.
        relaxation: "F" or "FCF", on all levels.
        cycles: at most so many.
        tolerance: ends at a residual of at most this; None takes all cycles.
        relative_tolerance: ends at a residual of at most this times that before the first cycle.
        cycle: "V", or "F", which visits coarse grids more often.
        nested: start from the coarsest grid's solution, improved by one V-cycle on each grid between it and the finest.

    Raises:
        ConfigError: a setting is out of range.

    Example:
        >>> Method(relaxation="F", cycles=3)
        Method(coarsening=4, levels=None, relaxation='F', cycles=3, tolerance=None, relative_tolerance=None, \
cycle='V', nested=False)
    """

    coarsening: int | Sequence[int] = 4
    levels: int | None = None
    relaxation: str = "FCF"
    cycles: int = 10
    tolerance: float | None = None
    relative_tolerance: float | None = None
    cycle: str = "V"
    nested: bool = False

    def __post_init__(self) -> None:
        check_names(self.relaxation, self.cycle)
        if not isinstance(self.cycles, int) or self.cycles < 0:
            raise ConfigError(f"cycles: found {self.cycles!r}; expected a whole number of at least 0. Correct cycles.")
        for key, value in (("tolerance", self.tolerance), ("relative_tolerance", self.relative_tolerance)):
            if value is not None and not (is_number(value) and value >= 0):
                raise ConfigError(f"{key}: found {value!r}; expected a number of at least 0, or null. Correct {key}.")


@dataclass(kw_only=True)
class MultigridSettings:
    """The settings that `Multigrid` and `MultigridResidual` share.

    Args:
        coarsening: one factor c for all levels, or one from each level to the next; the last chunk may be shorter.
        levels: at most so many, the finest included; None for all.
        relaxation: "F" or "FCF".
        cycles: of the forward solve (m1), at most.
        backward_cycles: of the backward solve (m2); None is the same.
        tolerance: ends the forward cycles at a residual of at most this times the first one; None takes all.
        backward_tolerance: the same backward.
        cycle: "V" or "F".
        nested: start from the coarser grids.
        warm_start: each sample starts from its states and adjoints of its last solve.
        guard_every: compare every so many gradients with the serial one, see `Guard`; 0 never does.
        guard_threshold: largest relative bias before cycles are added.
        guard_max_cycles: that may be added before it goes serial.
        over_ranks: divide the layers over the ranks of the run, where there are several: the samples of all are
            gathered, each rank relaxes its N/P layers for all of them, and gets its own samples' last states. Its
            gradient is that of its layers for all ranks' losses together, zero for the others, so that the mean over
            ranks is the one of data-parallel training. It is differentiable once. False: each rank relaxes all layers,
            for its own samples.

    Example:
        >>> settings = MultigridSettings(cycles=3, backward_cycles=1)
        >>> settings.forward.cycles, settings.backward.cycles
        (3, 1)
    """

    coarsening: int | Sequence[int] = 4
    levels: int | None = None
    relaxation: str = "FCF"
    cycles: int = 2
    backward_cycles: int | None = None
    tolerance: float | None = None
    backward_tolerance: float | None = None
    cycle: str = "V"
    nested: bool = False
    warm_start: bool = False
    guard_every: int = 0
    guard_threshold: float = 0.1
    guard_max_cycles: int = 8
    over_ranks: bool = False

    @property
    def forward(self) -> Method:
        """How the states are solved."""
        return self._method(self.cycles, self.tolerance)

    @property
    def backward(self) -> Method:
        """How the adjoints are solved."""
        return self._method(
            self.cycles if self.backward_cycles is None else self.backward_cycles, self.backward_tolerance
        )

    def _method(self, cycles: int, tolerance: float | None) -> Method:
        return Method(self.coarsening, self.levels, self.relaxation, cycles, None, tolerance, self.cycle, self.nested)


class MethodKeywords(TypedDict, total=False):
    """The fields of `Method`, as keywords: the types of `**method` in `mgrit`.

    Example:
        >>> keywords: MethodKeywords = {"relaxation": "F", "cycles": 3}
        >>> Method(**keywords).cycles
        3
    """

    coarsening: int | Sequence[int]
    levels: int | None
    relaxation: str
    cycles: int
    tolerance: float | None
    relative_tolerance: float | None
    cycle: str
    nested: bool


class MultigridKeywords(TypedDict, total=False):
    """The fields of `MultigridSettings`, as keywords: the types of `**settings` in `MultigridResidual`.

    Example:
        >>> keywords: MultigridKeywords = {"cycles": 3, "warm_start": True}
        >>> MultigridSettings(**keywords).backward.cycles
        3
    """

    coarsening: int | Sequence[int]
    levels: int | None
    relaxation: str
    cycles: int
    backward_cycles: int | None
    tolerance: float | None
    backward_tolerance: float | None
    cycle: str
    nested: bool
    warm_start: bool
    guard_every: int
    guard_threshold: float
    guard_max_cycles: int
    over_ranks: bool
