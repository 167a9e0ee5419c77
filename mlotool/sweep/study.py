"""Optuna chooses the points: one trial a job, kept in a database in the sweep's folder."""

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlotool.config.schema import PRUNERS, SAMPLERS
from mlotool.config.sweep_plan import Dimension, SweepPlan
from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean
from mlotool.sweep.extras import import_extra
from mlotool.sweep.folder import STUDY_FILE
from mlotool.sweep.job_folder import ENDED, JobOutcome, read_outcome
from mlotool.sweep.points import AbstractPoints, Point

# Workers write at the same time; SQLite waits this long for another one's lock.
SECONDS_TO_LOCK = 60


class StudyPoints(AbstractPoints):
    """The trials of an Optuna study.

    A trial that ran when an earlier process died goes on under its own number, so that a sweep that was killed
    and gone on with has as many trials as one that was not.

    Args:
        plan: the sweep.
        folder: its folder; the study of an earlier process there is gone on with.

    Raises:
        ConfigError: Optuna is missing or refuses the settings, or there is nothing to search or to look at.
    """

    def __init__(self, plan: SweepPlan, folder: Path) -> None:
        optuna = import_optuna()
        settings = plan.settings
        if plan.objective is None:
            raise ConfigError(
                "objective: found null with sweep=optuna; expected the logged key that the search looks at. "
                "Set objective=val/accuracy and objective_mode=max."
            )
        if not plan.dimensions:
            raise ConfigError(
                "sweep.params: found nothing to search; expected choices or ranges. Write "
                "'problems.<name>.optimizer.lr=tag(log, interval(1e-3, 1e-1))' on the command line."
            )
        self._distributions = {each.key: _distribution(optuna, each) for each in plan.dimensions}
        self._watched = {
            "url": settings["storage"] or f"sqlite:///{folder / STUDY_FILE}",
            "name": folder.name,
            "pruner": settings["pruner"],
            "pruner_options": dict(settings["pruner_options"]),
        }
        self._optuna, self._states = optuna, optuna.trial.TrialState
        self._study = optuna.create_study(
            storage=open_storage(self._watched["url"]),
            study_name=self._watched["name"],
            direction="maximize" if plan.mode == "max" else "minimize",
            pruner=make_pruner(settings["pruner"], settings["pruner_options"]),
            load_if_exists=True,
        )
        self.total, self.num_ended = settings["num_trials"], 0
        self._waiting = self._take_up(folder)
        # The first points of a seed are not to be drawn again; a sequence (qmc) is kept in the study, with its seed.
        past = len(self._study.get_trials(deepcopy=False)) if settings["sampler"] != "qmc" else 0
        self._study.sampler = _make(
            optuna.samplers, SAMPLERS, "sampler", settings["sampler"], settings["sampler_options"],
            seed=settings["seed"] + past,
        )  # fmt: skip
        self._num_given = self.num_ended

    def next(self) -> Point | None:
        """Return a trial that died, or else a new one."""
        if self._num_given >= self.total:
            return None
        self._num_given += 1
        if self._waiting:
            return self._waiting.pop(0)
        with warnings.catch_warnings():
            # Samplers that are experimental in Optuna say so each time.
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            trial = self._study.ask(self._distributions)
        return self._point(trial)

    def finish(self, point: Point, outcome: JobOutcome) -> None:
        """Tell the study; a trial that was interrupted stays as it is, to go on."""
        if outcome.status not in ENDED:
            return
        self.num_ended += 1
        if outcome.status == "finished" and outcome.value is not None:
            self._study.tell(point.number, outcome.value)
        elif outcome.status == "pruned":
            self._study.tell(point.number, state=self._states.PRUNED)
        else:
            self._study.tell(point.number, state=self._states.FAIL)

    def _take_up(self, folder: Path) -> list[Point]:
        """Count the trials of an earlier process, and return those that it left unfinished."""
        waiting = []
        for trial in self._study.get_trials():
            if trial.state.is_finished():
                # Without all of its values a trial never was a job: its process died while it was drawn.
                self.num_ended += trial.params.keys() >= self._distributions.keys()
            elif trial.params.keys() < self._distributions.keys():
                if trial.state == self._states.RUNNING:
                    self._study.tell(trial.number, state=self._states.FAIL)
            else:
                point, outcome = self._point(trial), read_outcome(folder / str(trial.number))
                if outcome.status in ENDED:
                    # The job ended, and the sweep died before it took note.
                    self.finish(point, outcome)
                else:
                    waiting.append(point)
        return waiting

    def _point(self, trial: Any) -> Point:
        words = (f"{key}={trial.params[key]}" for key in self._distributions)
        return Point(trial.number, tuple(words), {**self._watched, "trial": trial.number})


class Watcher:
    """Reports a job's objective to its trial, and asks whether to go on.

    Args:
        url: of the database.
        name: of the study.
        trial: its number.
        pruner: as in `sweep.pruner`.
        pruner_options: as in `sweep.pruner_options`.
    """

    def __init__(self, url: str, name: str, trial: int, pruner: str, pruner_options: Mapping[str, Any]) -> None:
        optuna = import_optuna()
        self._study = optuna.load_study(
            study_name=name, storage=open_storage(url), pruner=make_pruner(pruner, pruner_options)
        )
        [found] = (each for each in self._study.get_trials(deepcopy=False) if each.number == trial)
        self._trial = optuna.trial.Trial(self._study, found._trial_id)

    def __call__(self, tick: int, value: float) -> bool:
        """Report; return whether the job is to end."""
        with warnings.catch_warnings():
            # A trial that goes on from a checkpoint reports the ticks since then again.
            warnings.filterwarnings("ignore", message=".*reported value is ignored.*")
            self._trial.report(value, tick)
        return bool(self._trial.should_prune())


def import_optuna() -> Any:
    """Return the package, which says nothing below a warning; a missing one is a ConfigError."""
    optuna = import_extra("optuna", "sweep=optuna", "optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_storage(url: str) -> Any:
    """Open the database of a study.

    Raises:
        ConfigError: it does not open.
    """
    optuna = import_optuna()
    arguments = {"connect_args": {"timeout": SECONDS_TO_LOCK}} if url.startswith("sqlite:") else {}
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=arguments)
    # SQLAlchemy's errors have no common base but this, and a driver that is missing is an ImportError.
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"sweep.storage: found '{url}', which does not open ({reason}); expected a database such as "
            "sqlite:////folder/study.db or postgresql://host/name. Correct it, or leave it out."
        ) from error


def make_pruner(name: str, options: Mapping[str, Any]) -> Any:
    """Return the pruner that `sweep.pruner` names; options that it does not take are a ConfigError."""
    return _make(import_optuna().pruners, PRUNERS, "pruner", name, options)


def _make(
    module: Any, classes: Mapping[str, str], key: str, name: str, options: Mapping[str, Any], **given: Any
) -> Any:
    kind = getattr(module, classes[name])
    known = [each for each in inspect.signature(kind).parameters if each != "args"]
    given = {each: value for each, value in given.items() if each in known}
    for option in options:
        if option not in known or option in given:
            expected = ", ".join(each for each in known if each not in given) or "none"
            raise ConfigError(
                f"sweep.{key}_options.{option}: found an option that '{name}' does not have; expected {expected}."
                f"{did_you_mean(option, known)} Correct sweep.{key}_options."
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return kind(**given, **options)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(
            f"sweep.{key}: '{name}' does not start with the options {dict(options)} ({error}); expected values that "
            f"optuna.{key}s.{classes[name]} takes. Correct sweep.{key}_options."
        ) from error


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    kinds = optuna.distributions
    if dimension.low is None or dimension.high is None:
        return kinds.CategoricalDistribution(dimension.choices)
    if dimension.whole:
        step = int(dimension.step or 1)
        return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)
