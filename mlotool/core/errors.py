"""The errors that a user sees: what was found, what was expected, what to do."""


class MlotoolError(Exception):
    """Base of all errors that mlotool raises for its user; the CLI prints them without a traceback."""

    exit_code = 1


class ConfigError(MlotoolError, ValueError):
    """The configuration, a recipe or a command line is wrong; nothing has been run (exit code 2)."""

    exit_code = 2


class RunError(MlotoolError, RuntimeError):
    """A run has failed; what it had written stays (exit code 1)."""


class NonFiniteLossError(RunError):
    """A loss became NaN or infinite.

    Args:
        problem: name of the problem whose loss it was.
        tick: the tick, counted from 1, at which it happened.
        value: the loss as it was found.
    """

    def __init__(self, problem: str, tick: int, value: float) -> None:
        self.problem = problem
        self.tick = tick
        super().__init__(
            f"The loss of problem '{problem}' became {value} at tick {tick}; expected a finite number. "
            f"Lower problems.{problem}.optimizer.lr, or set problems.{problem}.gradient_clip_norm=1.0; "
            "checkpoints/ in the run folder holds the last good state."
        )
