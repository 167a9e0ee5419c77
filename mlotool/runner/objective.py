"""The number that a run is judged by, and where it comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlotool.config.objective import direction_faults, objective_direction
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.runner.plan import CHUNKS_PER_ROUND, TickPlan

Watch = Callable[[int, float], bool]
"""Called with tick and objective at each evaluation; true ends the run as pruned."""


@dataclass(frozen=True)
class Objective:
    """A logged key and its direction.

    Args:
        key: `<split>/<metric>` or `<problem>/<metric>`, or None where the recipe has none.
        mode: "min" or "max"; None where there is no key.
        is_tracked: whether it is known during training (a key of an `end` split is not), so that a best checkpoint
            can be kept.
    """

    key: str | None
    mode: str | None
    is_tracked: bool

    @classmethod
    def from_config(cls, config: Any) -> "Objective":
        """Read `objective`, and derive its direction.

        Raises:
            ConfigError: the split is evaluated without that metric, or the direction is not known or contradicts it.
        """
        key = config.objective
        splits = {} if config.evaluate is None else dict(config.evaluate.splits)
        source, _, name = (key or "").partition("/")
        # What functions of the user's return is known once they have been called: `rehearse` looks.
        is_known = source in splits and all(isinstance(metric, str) for metric in config.evaluate.metrics)
        if is_known and name not in config.evaluate.metrics:
            known = [f"{source}/{metric}" for metric in config.evaluate.metrics]
            raise ConfigError(
                f"objective: found '{key}'; expected one of {', '.join(known)}, which are evaluated on '{source}'."
                f"{did_you_mean(key, known)} Correct objective, or add '{name}' to evaluate.metrics."
            )
        faults = list(direction_faults(config))
        if faults:
            raise ConfigError("\n".join(faults))
        is_tracked = isinstance(splits.get(source), int) or source in config.problems
        return cls(key, objective_direction(config), is_tracked)

    @property
    def monitor(self) -> str | None:
        """The key that best checkpoints and early stopping watch, if they can."""
        return self.key if self.is_tracked else None

    def check_logged(self, values: Mapping[str, float]) -> None:
        """Raise ConfigError if a tracked objective is not among the logged keys."""
        if self.monitor is not None and self.monitor not in values:
            raise ConfigError(
                f"objective: found '{self.key}'; expected a logged key: {', '.join(sorted(values))}."
                f"{did_you_mean(self.monitor, values)} Correct objective."
            )


def make_plan(config: Any, objective: Objective) -> TickPlan:
    """Lay out a run's ticks: rounds end where the objective is evaluated."""
    runner = config.runner
    limit = config.debug.limit_ticks
    splits = {} if config.evaluate is None else dict(config.evaluate.splits)
    intervals = {split: every for split, every in splits.items() if isinstance(every, int)}
    source = (objective.key or "").partition("/")[0]
    # Without an evaluated objective a round is a whole number of flushes, so that a training loss is there to watch.
    flushes = -(-CHUNKS_PER_ROUND * runner.ticks_per_chunk // runner.log_every)
    max_ticks = runner.max_ticks if limit is None else min(runner.max_ticks, limit)
    return TickPlan(
        max_ticks=max_ticks,
        ticks_per_chunk=runner.ticks_per_chunk,
        log_every=runner.log_every,
        evaluation_intervals=intervals,
        round_ticks=intervals.get(source, flushes * runner.log_every),
        inherited_splits=tuple(splits) if config.get("inherit") is not None and max_ticks > 0 else (),
    )
