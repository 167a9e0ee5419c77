"""Optuna chooses the points: one trial a job, kept in a database in the sweep's folder."""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlotool.config.schema import PRUNERS, SAMPLERS
from mlotool.config.sweep_plan import Dimension, SweepPlan
from mlotool.core.errors import ConfigError, MlotoolError, WriteError
from mlotool.core.suggest import did_you_mean
from mlotool.sweep.extras import import_extra
from mlotool.sweep.folder import STUDY_FILE
from mlotool.sweep.job_folder import ENDED, JobOutcome, read_outcome
from mlotool.sweep.points import AbstractPoints, Point
from mlotool.sweep.study_file import check_study_file

# Workers write at the same time; SQLite waits this long for another one's lock.
SECONDS_TO_LOCK = 60
DIRECTIONS = {"max": "maximize", "min": "minimize"}


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
                "Set objective=val/accuracy."
            )
        if plan.mode is None:
            raise ConfigError(
                f"objective: found '{plan.objective}' in a sweep=optuna that varies what it is judged by; expected one "
                "objective and one objective_mode for all jobs. Take objective, objective_mode, evaluate and recipe "
                "out of what is searched."
            )
        if not plan.dimensions:
            raise ConfigError(
                "sweep.params: found nothing to search; expected choices or ranges. Write "
                "'problems.<name>.optimizer.lr=tag(log, interval(1e-3, 1e-1))' on the command line."
            )
        self._distributions = {each.key: _distribution(optuna, each) for each in plan.dimensions}
        if settings["sampler"] == "brute_force":
            _check_countable(plan)
        if not settings["storage"]:
            _check_own_study(folder, settings["sampler"])
        self._watched = {
            "url": settings["storage"] or f"sqlite:///{folder / STUDY_FILE}",
            "name": folder.name,
            "pruner": settings["pruner"],
            "pruner_options": dict(settings["pruner_options"]),
        }
        self._optuna, self._states = optuna, optuna.trial.TrialState
        self._folder, pruner = folder, make_pruner(settings["pruner"], settings["pruner_options"])
        is_found = not settings["storage"] and (folder / STUDY_FILE).exists()
        reading = self._reading if is_found else partial(storing, self._watched["url"])
        with reading():
            self._study = optuna.create_study(
                storage=open_storage(self._watched["url"]),
                study_name=self._watched["name"],
                direction=DIRECTIONS[plan.mode],
                pruner=pruner,
                load_if_exists=True,
            )
        if self._study.direction.name.lower() != DIRECTIONS[plan.mode]:
            raise ConfigError(
                f"resume: found a study in {folder} that is to {self._study.direction.name.lower()} {plan.objective}; "
                f"expected one that is to {DIRECTIONS[plan.mode]} it. Leave resume out for a new sweep."
            )
        self.total, self.num_ended = settings["num_trials"], 0
        with reading():
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
            with storing(self._watched["url"]):
                trial = self._study.ask(self._distributions)
        return self._point(trial)

    def finish(self, point: Point, outcome: JobOutcome) -> None:
        """Tell the study; a trial that was interrupted stays as it is, to go on."""
        if outcome.status not in ENDED:
            return
        self.num_ended += 1
        with storing(self._watched["url"]):
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
                self._check_values(trial)
                point, outcome = self._point(trial), read_outcome(folder / str(trial.number))
                if outcome.status in ENDED:
                    # The job ended, and the sweep died before it took note.
                    self.finish(point, outcome)
                else:
                    waiting.append(point)
        return waiting

    def _check_values(self, trial: Any) -> None:
        """Refuse values that the command line does not have: they become words of a job's command line."""
        for key, distribution in self._distributions.items():
            if not isinstance(trial.number, int) or trial.distributions[key] != distribution:
                raise ValueError(f"its trial {trial.number} draws {key} from {trial.distributions[key]}"[:300])
            value = distribution.to_internal_repr(trial.params[key])
            if not distribution._contains(value) or trial.params[key] != distribution.to_external_repr(value):
                raise ValueError(f"its trial {trial.number} has {key}={trial.params[key]!r}"[:300])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn the errors of Optuna, which reads a study that may be anybody's, into a ConfigError."""
        try:
            yield
        except (MlotoolError, OSError):
            raise
        # They have no common base: SQLAlchemy's, JSON's, and those of whatever takes wrong values.
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"resume: found a study in {self._folder} that is not that of this sweep ({type(error).__name__}: "
                f"{reason}); expected the one that the same command has begun. Leave resume out for a new sweep."
            ) from error

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
        optuna, self._url = import_optuna(), url
        self._study = optuna.load_study(
            study_name=name, storage=open_storage(url), pruner=make_pruner(pruner, pruner_options)
        )
        [found] = (each for each in self._study.get_trials(deepcopy=False) if each.number == trial)
        self._trial = optuna.trial.Trial(self._study, found._trial_id)

    def __call__(self, tick: int, value: float) -> bool:
        """Report; return whether the job is to end."""
        with storing(self._url):
            with warnings.catch_warnings():
                # A trial that goes on from a checkpoint reports the ticks since then again.
                warnings.filterwarnings("ignore", message=".*reported value is ignored.*")
                self._trial.report(value, tick)
            return bool(self._trial.should_prune())


@contextmanager
def storing(url: str) -> Iterator[None]:
    """Turn the errors of a study's database, of which a full disk is one, into a WriteError."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        cause = error.__cause__ or error
        raise WriteError(
            f"sweep.storage: the database {url} does not take what the study holds ({str(cause).partition(chr(10))[0]})"
            "; expected room on its disk, and that it answers. Free some space there, then go on with the sweep: the "
            "same command with resume=auto."
        ) from error


def _check_own_study(folder: Path, sampler: str) -> None:
    """Refuse a study in a sweep's folder, which may be a stranger's, where reading it could do harm."""
    check_study_file(folder, STUDY_FILE)
    if sampler == "cmaes" and (folder / STUDY_FILE).exists():
        # Optuna keeps the state of CMA-ES as a pickle in the study, and unpickles whatever stands there.
        url = f"sqlite:///{(folder / STUDY_FILE).absolute()}"
        raise ConfigError(
            f"resume: found a study in {folder} with sweep.sampler=cmaes, whose state is a pickle, which can run any "
            "code, while the folder may be anybody's; expected another sampler, or your word that the study is yours. "
            f"If it is, say where it is: sweep.storage={url}"
        )


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


def option_faults(settings: Mapping[str, Any]) -> list[str]:
    """Return what Optuna says of `sweep.sampler_options` and `sweep.pruner_options`; nothing where it is missing."""
    if settings["method"] != "optuna" or find_spec("optuna") is None:
        return []
    optuna, faults = import_optuna(), []
    for key, classes, module, given in (
        ("sampler", SAMPLERS, optuna.samplers, {"seed": settings["seed"]}),
        ("pruner", PRUNERS, optuna.pruners, {}),
    ):
        name, options = settings[key], settings[f"{key}_options"] or {}
        # Unknown names, and what are no options, have faults of their own.
        if name in classes and isinstance(options, Mapping):
            try:
                _make(module, classes, key, name, options, **given)
            except ConfigError as error:
                faults.append(str(error))
    return faults


def _make(
    module: Any, classes: Mapping[str, str], key: str, name: str, options: Mapping[str, Any], **given: Any
) -> Any:
    if name == "cmaes":
        # Optuna asks for it at its first own point, when jobs have been trained.
        import_extra("cmaes", "sweep.sampler=cmaes", "optuna")
    kind = getattr(module, classes[name])
    known = [each for each in inspect.signature(kind).parameters if each != "args"]
    given = {each: value for each, value in given.items() if each in known}
    for option in options:
        if option == "seed":
            raise ConfigError(
                f"sweep.{key}_options.seed: found {options['seed']!r}; expected the seed in a key of its own, which "
                "every sampler takes. Write sweep.seed=.."
            )
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


def _check_countable(plan: SweepPlan) -> None:
    """Refuse intervals of real numbers where each value is to be tried."""
    for each in plan.dimensions:
        if each.low is not None and not each.whole and each.step is None:
            raise ConfigError(
                f"{each.key}: found an interval with sweep.sampler=brute_force, which tries every value; expected "
                f"choices, or a range with a step. Write {each.key}=0.01,0.1, or choose another sampler."
            )


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    kinds = optuna.distributions
    if dimension.low is None or dimension.high is None:
        return kinds.CategoricalDistribution(dimension.choices)
    if dimension.whole:
        step = int(dimension.step or 1)
        return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)
