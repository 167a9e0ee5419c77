"""Optuna chooses the points: one trial a job, kept in a database in the sweep's folder."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mlotool.config.schema import OWN_SAMPLERS
from mlotool.config.sweep_plan import Dimension, SweepPlan
from mlotool.core.errors import ConfigError, InfeasibleModelError, MlotoolError
from mlotool.sweep.folder import STUDY_FILE
from mlotool.sweep.group_record import GroupRecord
from mlotool.sweep.groups import Group, Point
from mlotool.sweep.job_folder import ENDED, JobOutcome, read_outcome
from mlotool.sweep.points import AbstractPoints
from mlotool.sweep.study_decisions import (
    checked_decisions,
    is_drawn,
    is_infeasible,
    is_repeated,
    note_drawn,
    note_infeasible,
    note_repeated,
    suggest,
    words_of,
)
from mlotool.sweep.study_file import check_study_file
from mlotool.sweep.study_options import make_pruner, make_sampler
from mlotool.sweep.study_storage import import_optuna, open_storage, storing
from mlotool.sweep.study_values import StudyValues

_ALL_TRIED = "all_tried"
"""What a study is marked with once brute force has nothing left to try."""

Draw = Callable[[Sequence[str], Callable[[str, tuple[Any, ...]], Any]], Any]


class StudyPoints(AbstractPoints):
    """The trials of an Optuna study.

    A trial that ran when an earlier process died goes on under its own number, so that a sweep that was killed
    and gone on with has as many trials as one that was not.

    Args:
        plan: the sweep.
        folder: its folder; the study of an earlier process there is gone on with.
        record: the groups that had begun there.
        draw: makes the decisions of a job's models, of its words and of what decides; None where models ask for none.

    Raises:
        ConfigError: Optuna is missing or refuses the settings, or there is nothing to search or to look at.
    """

    def __init__(self, plan: SweepPlan, folder: Path, record: GroupRecord, draw: Draw | None = None) -> None:
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
        if not plan.dimensions and draw is None:
            raise ConfigError(
                "sweep.params: found nothing to search; expected choices or ranges. Write "
                "'problems.<name>.optimizer.lr=tag(log, interval(1e-3, 1e-1))' on the command line, or give a problem "
                "a module of _target_: mlotool.spaces.Space."
            )
        self._draw_decisions, self._values = draw, StudyValues(plan)
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
        self._fixed_seed, self._is_brute_force = plan.seed, settings["sampler"] == "brute_force"
        self._optuna, self._states = optuna, optuna.trial.TrialState
        self._folder, pruner = folder, make_pruner(settings["pruner"], settings["pruner_options"])
        is_found = not settings["storage"] and (folder / STUDY_FILE).exists()
        reading = self._reading if is_found else partial(storing, self._watched["url"])
        with reading():
            self._study = optuna.create_study(
                storage=open_storage(self._watched["url"]),
                study_name=self._watched["name"],
                directions=self._values.directions,
                pruner=pruner,
                load_if_exists=True,
            )
        found = [each.name.lower() for each in self._study.directions]
        if found != self._values.directions:
            raise ConfigError(
                f"resume: found a study in {folder} that is to {' and '.join(found)} {plan.objective}; expected one "
                f"that is to {' and '.join(self._values.directions)} it. Leave resume out for a new sweep."
            )
        self.total, self.num_ended = settings["num_trials"] * self._values.repeats, 0
        self._group_size = plan.group_size
        with reading():
            self._begun, self._waiting = self._take_up(folder, record)
        if self._study.user_attrs.get(_ALL_TRIED) is True and not self._begun and not self._waiting:
            self.total = self.num_ended
        # The first points of a seed are not to be drawn again. A sequence (qmc) is kept in the study, with its seed;
        # our own samplers draw by a trial's number.
        is_numbered = settings["sampler"] in ("qmc", *OWN_SAMPLERS)
        past = 0 if is_numbered else len(self._study.get_trials(deepcopy=False))
        self._study.sampler = make_sampler(settings["sampler"], self._options(settings), settings["seed"] + past)
        self._num_given = self.num_ended

    def _options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the sampler, with those of ours where the user has none."""
        own: dict[str, Any] = {}
        if settings["sampler"] == "tpe" and self._group_size > 1:
            # The jobs of a group are drawn before one of them has ended: a draw takes those before it for bad ones.
            own["constant_liar"] = True
        if settings["sampler"] == "tpe" and self._draw_decisions is not None:
            # Decisions depend on one another; some there are only in some models.
            own |= {"multivariate": True, "group": True}
        options = own | dict(settings["sampler_options"])
        if options.get("multivariate") is False and "group" not in settings["sampler_options"]:
            options.pop("group", None)
        return options

    def next(self) -> Group | None:
        """Return jobs that died, or else new ones."""
        if self._begun and self._num_given < self.total:
            group = self._begun.pop(0)
            self._num_given += len(group.waiting)
            return group
        points: list[Point] = []
        while len(points) < self._group_size and self._num_given < self.total:
            if not self._waiting:
                self._waiting += self._draw()
            if not self._waiting:
                break
            points.append(self._waiting.pop(0))
            self._num_given += 1
        return Group(tuple(points)) if points else None

    def _draw(self) -> list[Point]:
        """Return the jobs of a new trial; none where brute force has drawn all."""
        points, trial = self._drawn()
        others = self._study.get_trials(deepcopy=False)[: trial.number] if self._is_brute_force else []
        # Optuna notices it when a trial ends, and draws what it has drawn until then.
        if any(each.params == trial.params for each in others):
            with storing(self._watched["url"]), self._until_all_are_tried():
                note_repeated(trial)
                self._study.tell(trial.number, state=self._states.FAIL)
            self._study.set_user_attr(_ALL_TRIED, True)
            self.total = self._num_given
            return []
        return points

    def _drawn(self) -> tuple[list[Point], Any]:
        with warnings.catch_warnings():
            # Samplers that are experimental in Optuna say so each time.
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            with storing(self._watched["url"]):
                trial = self._study.ask(self._distributions)
            if self._draw_decisions is None:
                return self._points(trial), trial
            decided: dict[str, Any] = {}
            try:
                self._draw_decisions(self._own_words(trial), partial(suggest, trial, decided))
            except InfeasibleModelError as error:
                with storing(self._watched["url"]), self._until_all_are_tried(num_more=self._values.repeats):
                    note_infeasible(trial, str(error))
                    self._study.tell(trial.number, state=self._states.FAIL)
                return self._points(trial, refused=str(error)), trial
            except ConfigError:
                # Values that are drawn may be wrong: the job fails, and says so.
                pass
            with storing(self._watched["url"]):
                note_drawn(trial)
        return self._points(trial), trial

    def finish(self, point: Point, outcome: JobOutcome) -> None:
        """Tell the study, once all jobs of a trial have ended; one that was interrupted stays as it is, to go on."""
        if outcome.status not in ENDED:
            return
        self.num_ended += 1
        if point.refused is not None:
            return
        number = point.number // self._values.repeats
        told = self._values.add(number, point.number, outcome, self._folder / str(point.number))
        if told is None:
            return
        with storing(self._watched["url"]), self._until_all_are_tried():
            if told.values is not None:
                self._study.tell(number, told.values)
            else:
                self._study.tell(number, state=self._states.PRUNED if told.is_pruned else self._states.FAIL)

    @contextmanager
    def _until_all_are_tried(self, num_more: int = 0) -> Iterator[None]:
        """Take no more trials once every value has been tried, which Optuna says by an error after it took note.

        Args:
            num_more: jobs that were drawn, and are still to be given.
        """
        try:
            yield
        except RuntimeError as error:
            if "stop" not in str(error):
                raise
            self._study.set_user_attr(_ALL_TRIED, True)
            self.total = self._num_given + num_more

    def _take_up(self, folder: Path, record: GroupRecord) -> tuple[list[Group], list[Point]]:
        """Count the jobs of an earlier process; return the groups that it left unfinished, and single jobs."""
        points: dict[int, Point] = {}
        waiting: dict[int, Point] = {}
        trials: dict[int, Any] = {}
        for trial in self._study.get_trials():
            if is_repeated(trial):
                continue
            # Without all of its values a trial never was a job: its process died while it was drawn.
            is_whole = trial.params.keys() >= self._distributions.keys() and is_drawn(
                trial, self._draw_decisions is not None
            )
            if not is_whole:
                if trial.state == self._states.RUNNING:
                    self._study.tell(trial.number, state=self._states.FAIL)
                elif trial.state == self._states.FAIL and is_infeasible(trial):
                    self.num_ended += self._values.repeats
                continue
            jobs = self._points(trial)
            trials |= {point.number: trial for point in jobs}
            points |= {point.number: point for point in jobs}
            if trial.state.is_finished():
                self.num_ended += len(jobs)
                continue
            self._check_values(trial)
            for point in jobs:
                outcome = read_outcome(folder / str(point.number))
                if outcome.status in ENDED:
                    # The job ended, and the sweep died before it took note.
                    self.finish(point, outcome)
                else:
                    waiting[point.number] = point
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
        checked_decisions(trial)

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

    def _points(self, trial: Any, refused: str | None = None) -> list[Point]:
        """Return the jobs of a trial."""
        # A decision that the command line varies is a word as it stands there.
        words = (*self._own_words(trial), *words_of(trial, without=self._distributions))
        repeats = self._values.repeats
        first = trial.number * repeats
        if repeats == 1:
            study = {**self._watched, "trial": trial.number} if self._values.can_be_pruned else None
            return [Point(first, words, study, refused)]
        seeds = [f"seed={self._fixed_seed + number}" for number in range(repeats)]
        return [Point(first + number, (*words, seed), None, refused) for number, seed in enumerate(seeds)]

    def _own_words(self, trial: Any) -> tuple[str, ...]:
        return tuple(f"{key}={trial.params[key]}" for key in self._distributions)


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
