"""Settings of optimizers that change while a run trains, by `runner.changes` or `sweep=pbt`."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from mlotool.core.arguments import is_number
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.program import Program


def changeable(program: Program) -> dict[str, tuple[Any, str]]:
    """Return by key of the config the problem and the setting of its optimizer that may change while a run trains.

    Those are the numbers of optimizers that step all parameters alike, without rates that another problem gives.
    """
    return {
        f"problems.{name}.optimizer.{key}": (problem, key)
        for name, problem in program.problems.items()
        if problem.optimizer is not None and len(problem.optimizer.param_groups) == 1
        for key, value in problem.optimizer.param_groups[0].items()
        if is_number(value) and key != "initial_lr" and key not in problem.settings.optimizer_roles
    }


def set_settings(program: Program, settings: Mapping[str, Any]) -> None:
    """Give optimizers other settings from their next steps on.

    A learning rate with a scheduler is the rate that the scheduler began with: what it has made of it since then is
    scaled.

    Args:
        program: whose optimizers.
        settings: by key of the config, `problems.<name>.optimizer.lr`.

    Raises:
        ConfigError: a setting that cannot change; nothing is changed.
    """
    known = changeable(program)
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(
                f"{key}: cannot change in runner.changes or sweep=pbt, which set numbers of optimizers during "
                f"training; expected one of {', '.join(known) or 'none'}.{did_you_mean(key, known)} Leave it out."
            )
        if not is_number(value) or value < 0:
            raise ConfigError(
                f"{key}: found {value} in runner.changes or sweep=pbt; expected a number from 0 on. Correct it."
            )
    for key, value in settings.items():
        problem, name = known[key]
        group = problem.optimizer.param_groups[0]
        if name == "lr" and problem.scheduler is not None:
            _scale(problem.optimizer, problem.scheduler, value)
        else:
            group[name] = value


def _scale(optimizer: Optimizer, scheduler: Any, rate: float) -> None:
    group = optimizer.param_groups[0]
    before = group["initial_lr"]
    if before == 0:
        raise ConfigError(
            "runner.changes: found a learning rate that begins at 0, which cannot be changed by a factor."
        )
    factor = rate / before
    group["lr"], group["initial_lr"] = group["lr"] * factor, rate
    for one in _schedulers(scheduler):
        if hasattr(one, "base_lrs"):
            one.base_lrs = [base * factor for base in one.base_lrs]
        # What CosineAnnealingLR and its like end at is a rate of its own, and stays.
        if hasattr(one, "_last_lr"):
            one._last_lr = [last * factor for last in one._last_lr]


def _schedulers(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _schedulers(inner)


class Changes:
    """What `runner.changes` asks for.

    Args:
        program: whose optimizers.
        changes: by tick, the settings that hold from its end on.

    Raises:
        ConfigError: a setting that cannot change.
    """

    def __init__(self, program: Program, changes: Mapping[int, Mapping[str, Any]] | None) -> None:
        self._program = program
        self._by_tick = {int(tick): dict(settings) for tick, settings in (changes or {}).items()}
        known = changeable(program)
        for tick, settings in self._by_tick.items():
            if tick < 0:
                raise ConfigError(f"runner.changes: found tick {tick}; expected one from 0 on. Correct it.")
            for key in settings:
                if key not in known:
                    set_settings(program, {key: 0})

    def apply(self, tick: int) -> None:
        """Make the changes that are due after a tick: a checkpoint of that tick is from before them."""
        if tick in self._by_tick:
            set_settings(self._program, self._by_tick[tick])

    def until(self, tick: int, end: int) -> int:
        """Return the next tick after one that changes something, or the end where that comes first."""
        return min((change for change in self._by_tick if tick < change < end), default=end)
