"""How layers are solved by multigrid: of one solve, and of a module's training steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlotool.core.arguments import is_number, is_whole, require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.layerparallel.multigrid.grids import Grid, check_names, critical_path, make_grids

AUTO = "auto"
"""In the place of a number of cycles: they are chosen."""


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
        require(is_whole(self.cycles, 0), "cycles", self.cycles, "a whole number of at least 0")
        _check_tolerance("tolerance", self.tolerance)
        _check_tolerance("relative_tolerance", self.relative_tolerance)

    def grids(self, num_layers: int) -> tuple[Grid, ...]:
        """Return the grids of so many layers, finest first."""
        return make_grids(num_layers, self.coarsening, self.levels)

    def critical(self, num_layers: int, workers: int) -> int:
        """Return the evaluations of a solve of so many layers that one of so many workers takes in a row."""
        settings = self.coarsening, self.levels, self.relaxation, self.cycles, workers
        return critical_path(num_layers, *settings, cycle=self.cycle, nested=self.nested).critical


@dataclass(kw_only=True)
class MultigridSettings:
    """The settings that `Multigrid` and `MultigridResidual` share.

    Args:
        coarsening: one factor c for all levels, or one from each level to the next; the last chunk may be shorter.
            None is 4, or less where there are fewer than 8 layers, and with `cycles="auto"` any.
        levels: at most so many, the finest included; None for all.
        relaxation: "F" or "FCF".
        cycles: of the forward solve (m1), at most; or "auto": the cheapest number of cycles and coarsening whose bias
            is within guard_threshold, with at most guard_max_cycles cycles, and serial passes where none is cheaper
            than these (see `Choice`).
        backward_cycles: of the backward solve (m2); None is the same.
        tolerance: ends the forward cycles at a residual of at most this times the first one; None takes all.
        backward_tolerance: the same backward.
        cycle: "V" or "F".
        nested: start from the coarser grids.
        warm_start: each sample starts from its states and adjoints of its last solve.
        guard_every: compare every so many gradients with the serial one, see `Guard`; 0 never does. None is 0, and
            100 with `cycles="auto"`.
        guard_threshold: largest relative bias before cycles are added, or others are chosen.
        guard_max_cycles: that may be added before it goes serial.
        workers: of `cycles="auto"`: chunks of layers that are evaluated at the same time. None counts the ranks where
            `over_ranks` divides the layers among them, all chunks on a GPU, and one on a CPU.
        over_ranks: divide the layers over the ranks of the run, where there are several: the samples of all are
            gathered, each rank relaxes its N/P layers for all of them, and gets its own samples' last states. Its
            gradient is that of its layers for all ranks' losses together, zero for the others, so that the mean over
            ranks is the one of data-parallel training. It is differentiable once. False: each rank relaxes all layers,
            for its own samples.

    Raises:
        ConfigError: a setting is out of range, or does nothing beside another one.

    Example:
        >>> settings = MultigridSettings(cycles=3, backward_cycles=1)
        >>> [method.cycles for method in settings.methods(num_layers=16)]
        [3, 1]
    """

    coarsening: int | Sequence[int] | None = None
    levels: int | None = None
    relaxation: str = "FCF"
    cycles: int | str = 2
    backward_cycles: int | None = None
    tolerance: float | None = None
    backward_tolerance: float | None = None
    cycle: str = "V"
    nested: bool = False
    warm_start: bool = False
    guard_every: int | None = None
    guard_threshold: float = 0.1
    guard_max_cycles: int = 8
    workers: int | None = None
    over_ranks: bool = False

    def methods(self, num_layers: int) -> tuple[Method, Method]:
        """Return how the states and how the adjoints of so many layers are solved."""
        backward_cycles = self.cycles if self.backward_cycles is None else self.backward_cycles
        return (
            self._method(num_layers, self.cycles, self.tolerance),
            self._method(num_layers, backward_cycles, self.backward_tolerance),
        )

    @property
    def is_chosen(self) -> bool:
        """Whether cycles and coarsening are chosen by the gradient's bias."""
        return self.cycles == AUTO

    def check(self) -> None:
        """Refuse settings that are out of range, each by its own name, and those that nothing would look at."""
        hint = did_you_mean(self.cycles, [AUTO]) if isinstance(self.cycles, str) else ""
        is_right, advice = self.is_chosen or is_whole(self.cycles, 0), f"{hint} Correct cycles.".strip()
        require(is_right, "cycles", self.cycles, "a whole number of at least 0, or auto", advice)
        for key, least in (("backward_cycles", 0), ("workers", 1)):
            value = getattr(self, key)
            is_right = value is None or is_whole(value, least)
            require(is_right, key, value, f"a whole number of at least {least}, or null")
        for key in ("tolerance", "backward_tolerance"):
            _check_tolerance(key, getattr(self, key))
        for key in ("nested", "warm_start", "over_ranks"):
            require(isinstance(getattr(self, key), bool), key, getattr(self, key), "true or false")
        keys: tuple[str, ...] = ("workers",)
        reason, other = "only cycles=auto counts workers", AUTO
        if self.is_chosen:
            keys, other = ("backward_cycles", "tolerance", "backward_tolerance", "warm_start"), "2"
            reason = "both solves take the chosen cycles, all of them, each from a new start"
        for key in keys:
            value, advice = getattr(self, key), f"Leave {key} out, or set cycles={other}."
            if value not in (None, False):
                raise ConfigError(
                    f"{key}: found {value!r} with cycles={self.cycles}; expected none, since {reason}. {advice}"
                )

    def _method(self, num_layers: int, cycles: int | str, tolerance: float | None) -> Method:
        # Of `cycles: auto` the plans have their own.
        count = cycles if isinstance(cycles, int) else 0
        factor = max(2, min(4, num_layers // 2)) if self.coarsening is None else self.coarsening
        return Method(factor, self.levels, self.relaxation, count, None, tolerance, self.cycle, self.nested)


def _check_tolerance(key: str, value: object) -> None:
    is_right = value is None or (is_number(value) and value >= 0)  # type: ignore[operator]
    require(is_right, key, value, "a number of at least 0, or null")
