"""Optuna chooses the points: one trial a job, kept in a database in the sweep's folder."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mlotool.config.sweep_plan import Dimension, SweepPlan
from mlotool.core.errors import ConfigError, MlotoolError
from mlotool.sweep.folder import STUDY_FILE
from mlotool.sweep.group_record import GroupRecord
from mlotool.sweep.groups import Group, Point
from mlotool.sweep.job_folder import ENDED, JobOutcome, read_outcome
from mlotool.sweep.points import AbstractPoints
from mlotool.sweep.study_file import check_study_file
from mlotool.sweep.study_options import make_pruner, make_sampler
from mlotool.sweep.study_storage import import_optuna, open_storage, storing

DIRECTIONS = {"max": "maximize", "min": "minimize"}


class StudyPoints(AbstractPoints):
    """The trials of an Optuna study.

    A trial that ran when an earlier process died goes on under its own number, so that a sweep that was killed
    and gone on with has as many trials as one that was not.

    Args:
        plan: the sweep.
        folder: its folder; the study of an earlier process there is gone on with.
        record: the groups that had begun there.

    Raises:
        ConfigError: Optuna is missing or refuses the settings, or there is nothing to search or to look at.
    """

    def __init__(self, plan: SweepPlan, folder: Path, record: GroupRecord) -> None:
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
        self.total, self.num_ended, self._group_size = settings["num_trials"], 0, plan.group_size
        with reading():
            self._begun, self._waiting = self._take_up(folder, record)
        # The first points of a seed are not to be drawn again; a sequence (qmc) is kept in the study, with its seed.
        past = len(self._study.get_trials(deepcopy=False)) if settings["sampler"] != "qmc" else 0
        options = settings["sampler_options"]
        if settings["sampler"] == "tpe" and self._group_size > 1:
            # The jobs of a group are drawn before one of them has ended: a draw takes those before it for bad ones.
            options = {"constant_liar": True, **options}
        self._study.sampler = make_sampler(settings["sampler"], options, settings["seed"] + past)
        self._num_given = self.num_ended

    def next(self) -> Group | None:
        """Return trials that died, or else new ones."""
        if self._begun and self._num_given < self.total:
            group = self._begun.pop(0)
            self._num_given += len(group.waiting)
            return group
        points = [self._draw() for _ in range(min(self._group_size, self.total - self._num_given))]
        self._num_given += len(points)
        return Group(tuple(points)) if points else None

    def _draw(self) -> Point:
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

    def _take_up(self, folder: Path, record: GroupRecord) -> tuple[list[Group], list[Point]]:
        """Count the trials of an earlier process; return the groups that it left unfinished, and single trials."""
        trials: dict[int, Any] = {}
        points: dict[int, Point] = {}
        waiting: dict[int, Point] = {}
        for trial in self._study.get_trials():
            if trial.params.keys() >= self._distributions.keys():
                trials[trial.number], points[trial.number] = trial, self._point(trial)
            if trial.state.is_finished():
                # Without all of its values a trial never was a job: its process died while it was drawn.
                self.num_ended += trial.params.keys() >= self._distributions.keys()
            elif trial.params.keys() < self._distributions.keys():
                if trial.state == self._states.RUNNING:
                    self._study.tell(trial.number, state=self._states.FAIL)
            else:
                self._check_values(trial)
                point, outcome = points[trial.number], read_outcome(folder / str(trial.number))
                if outcome.status in ENDED:
                    # The job ended, and the sweep died before it took note.
                    self.finish(point, outcome)
                else:
                    waiting[trial.number] = point
        groups = record.groups(points, waiting)
        for number in frozenset().union(*(group.ended for group in groups)):
            self._check_values(trials[number])
        taken = {point.number for group in groups for point in group.points}
        return groups, [point for number, point in waiting.items() if number not in taken]

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
