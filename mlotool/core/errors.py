"""The errors that a user sees: what was found, what was expected, what to do."""

from collections.abc import Sequence
from pathlib import Path


class MlotoolError(Exception):
    """Base class of all errors that mlotool raises for its users; the command line prints them without a traceback.

    Attributes:
        exit_code: exit code of the command line, 1 or 2.

    Example::

        try:
            result = mlotool.run(mlotool.compose("mwn", ["seed=1"]))
        except mlotool.MlotoolError as error:
            print(error)
    """

    exit_code = 1


class ConfigError(MlotoolError, ValueError):
    """A configuration, a recipe or a command line is wrong; nothing has been run (exit code 2)."""

    exit_code = 2


class RefusedError(ConfigError):
    """A constructor refuses its settings, by an error that it raises itself (`core.user_code.is_refusal`)."""


class InfeasibleModelError(ConfigError):
    """Decisions of a model space that make no model: shapes do not fit. A sweep takes the next ones; a run ends.

    A constructor that calls `choose`, or that makes a candidate, may raise it.
    """


class RefusedModelError(InfeasibleModelError):
    """A constructor refuses what decisions give it; where it refuses the first candidates, the recipe is wrong."""


class RunError(MlotoolError, RuntimeError):
    """A run has failed; the files that it has written stay (exit code 1).

    Attributes:
        run_dir: the run folder; None if the error did not come from a run.
    """

    run_dir: Path | None = None

    def add(self, sentence: str) -> None:
        """Append a sentence to the message, for what only a caller further up knows."""
        self.args = (f"{self} {sentence}",)


class PrunedError(MlotoolError):
    """A job of a sweep was stopped because others do better; that is no failure, and no caller of `run` sees it."""


class CheckpointError(RunError):
    """A checkpoint cannot be read: it is torn, or none of ours."""


class RunFileError(ConfigError):
    """A file of a run's folder is not taken: a link that leads out of it, no file, too large, or not what it is named.

    A run folder may be a stranger's; see `folders/safe_files.py`.
    """


class WriteError(RunError):
    """The disk does not take a file: it is full, may not be written to, or is gone."""


class Interrupted(KeyboardInterrupt):
    """A signal has ended a run; unlike errors it passes through whatever catches those.

    Args:
        exit_code: 130 after SIGINT (Ctrl-C), 143 after SIGTERM (a cluster's preemption).

    Attributes:
        run_dir: the run folder, once there is one.
    """

    def __init__(self, exit_code: int = 130) -> None:
        super().__init__()
        self.exit_code = exit_code
        self.run_dir: Path | None = None

    def __str__(self) -> str:
        if self.run_dir is None:
            return "interrupted"
        return f"interrupted; the run is in {self.run_dir}. If it saves checkpoints, resume='auto' continues it"


class NonFiniteLossError(RunError):
    """A loss became NaN or infinite.

    Args:
        problem: name of the problem whose loss it was.
        tick: the tick, counted from 1, at which it happened.
        value: the loss as it was found.
        reason: what may have made it so and what to do, in whole sentences: it need not be that problem's fault.
    """

    def __init__(self, problem: str, tick: int, value: float, reason: str = "") -> None:
        self.problem = problem
        self.tick = tick
        reason = reason or (
            f"Lower problems.{problem}.optimizer.lr, or that of a problem whose parameters its loss uses."
        )
        fault = f"The loss of problem '{problem}' became {value} at tick {tick}"
        super().__init__(f"{fault}; expected a finite number. {reason}")


class NonFiniteParametersError(RunError):
    """Parameters became NaN or infinite though the losses are finite: a gradient was not.

    Args:
        problem: name of the problem whose parameters they are; the first one, where there are several.
        tick: the tick, counted from 1, after which they were found; they are looked at once a round.
        others: the other problems of which that is so.
        advice: what to lower, a whole sentence.
    """

    def __init__(self, problem: str, tick: int, others: Sequence[str] = (), advice: str = "") -> None:
        self.problem = problem
        self.tick = tick
        names = [f"'{name}'" for name in (problem, *others)]
        whose = f"problem {names[0]}" if not others else f"the problems {', '.join(names)}"
        super().__init__(
            f"The parameters of {whose} were found to be NaN or infinite after tick {tick}, while all losses were "
            "finite; expected finite numbers. Look for sqrt, log, norm or a division at zero in the loss of "
            f"'{problem}' and of the problems that read it. {advice or f'Or lower problems.{problem}.optimizer.lr.'}"
        )
