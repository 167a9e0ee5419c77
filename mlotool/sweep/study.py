"""Optuna chooses the points: one trial a job, kept in a database in the sweep's folder."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from mlotool.config.sweep_plan import SweepPlan
from mlotool.core.errors import ConfigError, InfeasibleModelError, MlotoolError, RunError
from mlotool.core.messages import did_you_mean
from mlotool.sweep.folder import STUDY_FILE, study_name
from mlotool.sweep.job_folder import ENDED, JobOutcome, read_numbers, read_outcome
from mlotool.sweep.points import AbstractPoints, Group, GroupRecord, Point
from mlotool.sweep.storage import check_own_study, import_optuna, open_storage, storing
from mlotool.sweep.study_options import make_pruner, make_study_sampler, sampler_options
from mlotool.sweep.trials import (
    MOST_IN_A_ROW,
    SamePoints,
    ask,
    check_values,
    distributions_of,
    is_drawn,
    make_all,
    note_drawn,
    note_infeasible,
    reason_of,
    words_of,
)

DIRECTIONS = {"max": "maximize", "min": "minimize"}


@dataclass(frozen=True)
class TrialResult:
    """What the jobs of a trial have found together.

    Args:
        values: of its objectives; None where a job has none, or one that is not a number.
        is_pruned: whether a job was stopped because others did better.
        has_crashed: whether a job has failed; the others would find the same again.
    """

    values: list[float] | None
    is_pruned: bool = False
    has_crashed: bool = False


class StudyValues:
    """Gathers the objectives of the jobs of each trial; with several jobs a trial has their means.

    Args:
        plan: the sweep.

    Attributes:
        directions: of the objectives, in Optuna's words.
        repeats: jobs of a trial.
        can_be_pruned: whether a job may be stopped because others do better.

    Raises:
        ConfigError: repetitions, and a seed that is searched.
    """

    def __init__(self, plan: SweepPlan) -> None:
        settings = plan.settings
        assert plan.mode is not None
        self.repeats: int = settings["repeats"]
        self._second: str | None = settings["second_objective"]
        self.directions = [DIRECTIONS[plan.mode]]
        if self._second is not None:
            self.directions.append(DIRECTIONS[settings["second_objective_mode"]])
        self.can_be_pruned = self.repeats == 1 and self._second is None
        self._ended: dict[int, dict[int, tuple[JobOutcome, float | None]]] = {}
        if self.repeats > 1 and any(each.key == "seed" for each in plan.dimensions):
            raise ConfigError(
                f"sweep.repeats: found {self.repeats} beside a seed that is searched; expected one of the two, as each "
                "repetition has a seed of its own. Leave seed out."
            )

    def add(self, trial: int, job: int, outcome: JobOutcome, folder: Path) -> TrialResult | None:
        """Take note of a job that has ended; return the result of its trial, or None while jobs of it run.

        Args:
            trial: its number.
            job: its number.
            outcome: how it has ended.
            folder: the job's.

        Raises:
            RunError: a job that has finished has no value of the second objective.
        """
        known = {} if self._second is None else read_numbers(folder)
        second = known.get(self._second or "")
        if second is None and self._second is not None and outcome.status == "finished":
            raise RunError(
                f"sweep.second_objective: found {self._second}, which {folder} has not; expected one of "
                f"{', '.join(known) or 'the keys of its summary.json'}.{did_you_mean(self._second, known)} Start the "
                "sweep again with that key."
            )
        ended = self._ended.setdefault(trial, {})
        ended[job] = outcome, second
        if len(ended) < self.repeats:
            return None
        del self._ended[trial]
        outcomes = [each for each, _ in ended.values()]
        firsts = [each.value for each in outcomes if each.status == "finished" and each.value is not None]
        seconds = [value for _, value in ended.values() if value is not None]
        columns = [firsts] if self._second is None else [firsts, seconds]
        if all(len(column) == self.repeats for column in columns):
            means = [fmean(column) for column in columns]
            return TrialResult(None if any(map(math.isnan, means)) else means)
        statuses = {each.status for each in outcomes}
        return TrialResult(None, is_pruned="pruned" in statuses, has_crashed="failed" in statuses)


@dataclass
class JobCounts:
    """The jobs that a study has given, and its draws.

    Args:
        num_given: jobs that were given to be run, by this process or an earlier one that saw them end.
        num_ended: of these, how many have ended.
        num_interrupted: of these, how many were interrupted, and go on when the sweep does.
        num_known: draws of known points, which have no jobs.
        num_known_in_a_row: how many of them came one after the other, at last.
    """

    num_given: int = 0
    num_ended: int = 0
    num_interrupted: int = 0
    num_known: int = 0
    num_known_in_a_row: int = 0

    @property
    def num_running(self) -> int:
        """Jobs that were given, and have neither ended nor been interrupted."""
        return self.num_given - self.num_ended - self.num_interrupted

    def end(self, num: int = 1) -> None:
        """Count jobs that have ended, from which the sampler may learn to draw other points."""
        self.num_ended += num
        self.num_known_in_a_row = 0


def check_study(plan: SweepPlan, *, has_decisions: bool) -> tuple[StudyValues, dict[str, Any]]:
    """Return what the trials of a search find, and what they are drawn from.

    Raises:
        ConfigError: there is no one objective for all jobs, or nothing to search.
    """
    if plan.objective is None:
        raise ConfigError(
            "objective: found null with sweep=optuna; expected the logged key that the search looks at. "
            "Set objective=val/accuracy."
        )
    if plan.mode is None:
        raise ConfigError(
            f"objective: found '{plan.objective}' in a sweep=optuna that varies what it is judged by; expected one "
            "for all jobs. Take objective, objective_mode, evaluate and recipe out of what is searched."
        )
    if not plan.dimensions and not has_decisions:
        raise ConfigError(
            "sweep.params: found nothing to search; expected choices or ranges. Write 'problems.<name>.optimizer.lr="
            "tag(log, interval(1e-3, 1e-1))', or give a problem a module of _target_: mlotool.spaces.Space."
        )
    return StudyValues(plan), distributions_of(plan)


def _check_found(study: Any, directions: Sequence[str], plan: SweepPlan, url: str, *, is_resumed: bool) -> None:
    """Refuse the study of another sweep, or one that looks for other values.

    Sweeps that share a database name theirs by their folders.
    """
    num_begun = sum(trial.state.name != "WAITING" for trial in study.get_trials(deepcopy=False))
    if num_begun and not is_resumed:
        raise ConfigError(
            f"sweep.storage: found a study '{study.study_name}' with {num_begun} trials in {url}, while this sweep is "
            "a new one; expected none of the name of its folder. Choose a folder of another name with hydra.sweep.dir, "
            "or go on with that sweep: resume=<its folder>."
        )
    found = [each.name.lower() for each in study.directions]
    if found != list(directions):
        raise ConfigError(
            f"resume: found a study {url} that is to {' and '.join(found)} {plan.objective}; expected one "
            f"that is to {' and '.join(directions)} it. Leave resume out for a new sweep."
        )


_ALL_TRIED = "all_tried"
"""What a study is marked with once brute force has nothing left to try."""

_ALL_TRIED_TEXT = "brute force has tried every point"

Draw = Callable[[Sequence[str], Callable[[str, tuple[Any, ...]], Any]], Any]


class StudyPoints(AbstractPoints):
    """The trials of an Optuna study.

    A trial that ran, or was being drawn, when an earlier process died goes on under its own number, so that a sweep
    that was killed and gone on with has as many trials as one that was not.

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
        self._make_decisions = draw
        self._values, self._distributions = check_study(plan, has_decisions=draw is not None)
        if not settings["storage"]:
            check_own_study(folder, STUDY_FILE, settings["sampler"])
        self._watched = {
            "url": settings["storage"] or f"sqlite:///{folder / STUDY_FILE}",
            "name": study_name(folder),
            "pruner": settings["pruner"],
            "pruner_options": dict(settings["pruner_options"]),
        }
        self._fixed_seed = plan.seed
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
            url, directions = self._watched["url"], self._values.directions
            _check_found(self._study, directions, plan, url, is_resumed=record.is_resumed)
        self._num_planned = settings["num_trials"] * self._values.repeats
        self.total, self._counts = self._num_planned, JobCounts()
        self._group_size, self._sampler = plan.group_size, settings["sampler"]
        self._same = SamePoints(optuna, self._study)
        with reading():
            self._begun, self._waiting = self._take_up(folder, record)
        if self._study.user_attrs.get(_ALL_TRIED) is True:
            self._end(_ALL_TRIED_TEXT)
        options = sampler_options(plan, has_decisions=draw is not None)
        self._study.sampler = make_study_sampler(settings["sampler"], options, settings["seed"])

    @property
    def num_ended(self) -> int:
        """How many jobs have ended."""
        return self._counts.num_ended

    @property
    def num_same(self) -> int:
        """How many draws were of known points, and have no jobs of their own."""
        return self._counts.num_known

    def next(self) -> Group | None:
        """Return jobs that died, or else new ones; the jobs of a trial stay together as far as a group has room."""
        if self._begun and self._counts.num_given < self.total:
            return self._given(self._begun.pop(0))
        points: list[Point] = []
        while more := self._of_one_trial(self._group_size - len(points), is_first=not points):
            points += more
            self._given(Group(tuple(more)))
        return Group(tuple(points)) if points else None

    def _given(self, group: Group) -> Group:
        self._counts.num_given += len(group.waiting)
        return group

    def _of_one_trial(self, room: int, *, is_first: bool) -> list[Point]:
        """Return jobs of one trial, all that are left of it or as many as a group takes; none without room for all."""
        if self._counts.num_given >= self.total or (not self._waiting and not is_first and room < self._values.repeats):
            return []
        if not self._waiting:
            self._waiting = self._new_trial()
        same = [each for each in self._waiting if self._trial_of(each) == self._trial_of(self._waiting[0])]
        if len(same) > room and not is_first:
            return []
        self._waiting = self._waiting[len(same[:room]) :]
        return same[:room]

    def _new_trial(self) -> list[Point]:
        """Return the jobs of the next trial whose point is new; none where all draws are of known points."""
        counts = self._counts
        while counts.num_known_in_a_row < MOST_IN_A_ROW and counts.num_given < self.total:
            points = self._jobs_of_next_draw()
            if points:
                counts.num_known_in_a_row = 0
                return points
        # From what runs the sampler may learn to draw other points.
        if counts.num_known_in_a_row >= MOST_IN_A_ROW and not counts.num_running:
            self._end(self._why_it_ends())
        return []

    def _why_it_ends(self) -> str:
        """Return why no more trials are drawn where the sampler draws known points alone."""
        found, num = (
            f"the last {self._counts.num_known_in_a_row} draws were all of known points",
            self._counts.num_interrupted,
        )
        if num:
            advice = "They go on, and the search with them: the same command with resume=auto"
            return f"{found}, of which {num} jobs were interrupted. {advice}"
        return f"{found}: each was tried, or sweep.sampler={self._sampler} draws no others any more"

    def _jobs_of_next_draw(self) -> list[Point]:
        """Return the jobs of the next trial; none where its point is known."""
        # A queued trial says nothing of what the sampler has left to draw.
        is_queued = bool(self._study.get_trials(deepcopy=False, states=(self._states.WAITING,)))
        trial, refused = self._ask()
        first = self._same.first(trial)
        if first is not None:
            self._counts.num_known += 1
            self._counts.num_known_in_a_row += 1
            with self._telling():
                self._same.repeat(trial.number, first)
            if self._sampler == "brute_force" and not is_queued:
                # Optuna notices it when a trial ends, and draws known points until then.
                self._note_all_tried()
            return []
        points = self._points(trial, refused)
        self._same.add(trial)
        with self._telling(num_more=len(points)):
            if refused is not None:
                note_infeasible(trial, refused)
                self._study.tell(trial.number, state=self._states.FAIL)
            elif self._make_decisions is not None:
                note_drawn(trial)
        return points

    def _ask(self) -> tuple[Any, str | None]:
        """Return a trial with its values and decisions, and why they make no model, if so."""
        with warnings.catch_warnings():
            # Samplers that are experimental in Optuna say so each time.
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            url = self._watched["url"]
            with storing(url):
                trial = ask(self._study, self._distributions)
            with self._reading():
                # One that was queued, or half drawn, may have values of anybody's.
                check_values(trial, self._distributions)
            try:
                if self._make_decisions is not None:
                    make_all(trial, self._make_decisions, self._own_words(trial), storing(url))
            except InfeasibleModelError as error:
                return trial, str(error)
            except ConfigError:
                # Values that are drawn may be wrong: the job fails, and says so.
                pass
        return trial, None

    def finish(self, point: Point, outcome: JobOutcome) -> None:
        """Tell the study, once all jobs of a trial have ended; one that was interrupted stays as it is, to go on."""
        if outcome.status not in ENDED:
            self._counts.num_interrupted += 1
            return
        self._counts.end()
        if point.refused is not None:
            return
        number = self._trial_of(point)
        result = self._values.add(number, point.number, outcome, self._folder / str(point.number))
        if result is None:
            return
        with self._telling():
            if result.values is not None:
                self._study.tell(number, result.values)
            elif result.is_pruned:
                self._study.tell(number, state=self._states.PRUNED)
            else:
                if not result.has_crashed:
                    self._same.note_no_value(number)
                self._study.tell(number, state=self._states.FAIL)
        with self._telling():
            self._same.pass_on(number)

    @contextmanager
    def _telling(self, num_more: int = 0) -> Iterator[None]:
        """Write into the study; take no more trials once every value has been tried.

        Optuna says so by an error, after it took note of what it was told.

        Args:
            num_more: jobs that were drawn, and are still to be given.
        """
        with storing(self._watched["url"]):
            try:
                yield
            except RuntimeError as error:
                if "stop" not in str(error):
                    raise
                self._note_all_tried(num_more)

    def _note_all_tried(self, num_more: int = 0) -> None:
        self._study.set_user_attr(_ALL_TRIED, True)
        self._end(_ALL_TRIED_TEXT, num_more)

    def _end(self, reason: str, num_more: int = 0) -> None:
        """Draw no more trials."""
        begun = sum(len(group.waiting) for group in self._begun)
        self.total = self._counts.num_given + begun + len(self._waiting) + num_more
        if self.total < self._num_planned:
            self.ending = f"the search ends with {self.total} of {self._num_planned} jobs: {reason}"

    def _take_up(self, folder: Path, record: GroupRecord) -> tuple[list[Group], list[Point]]:
        """Count the jobs of an earlier process; return the groups that it left unfinished, and single jobs."""
        points: dict[int, Point] = {}
        waiting: dict[int, Point] = {}
        trials: dict[int, Any] = {}
        for trial in self._study.get_trials():
            if self._same.take_up(trial):
                self._counts.num_known += 1
                continue
            refused, is_over = reason_of(trial), trial.state.is_finished()
            is_whole = refused is not None or is_drawn(trial, self._make_decisions is not None)
            if not is_whole or not self._has_values(trial) or trial.state == self._states.WAITING:
                self._draw_later(trial)
                continue
            if not is_over and refused is not None:
                self._study.tell(trial.number, state=self._states.FAIL)
            jobs, first = self._points(trial, refused), self._same.first(trial)
            if not is_over and first is not None and not any((folder / str(each.number)).exists() for each in jobs):
                self._same.repeat(trial.number, first)
                self._counts.num_known += 1
                continue
            self._same.add(trial)
            trials |= {point.number: trial for point in jobs}
            points |= {point.number: point for point in jobs}
            if is_over and refused is None:
                self._counts.num_given += len(jobs)
                self._counts.end(len(jobs))
                continue
            check_values(trial, self._distributions)
            for point in jobs:
                outcome = read_outcome(folder / str(point.number))
                if outcome.status in ENDED:
                    # The job ended, and the sweep died before it took note.
                    self._counts.num_given += 1
                    self.finish(point, outcome)
                else:
                    waiting[point.number] = point
        groups = record.groups(points, waiting)
        for number in frozenset().union(*(group.ended for group in groups)):
            check_values(trials[number], self._distributions)
        taken = {point.number for group in groups for point in group.points}
        return groups, [point for number, point in waiting.items() if number not in taken]

    def _draw_later(self, trial: Any) -> None:
        """Put a trial whose process died while it was drawn into the queue; the next draw gives it what it lacks.

        It is not marked as failed, as Optuna's brute force takes the values of a trial that has ended for all that a
        trial with these values has.
        """
        if trial.state == self._states.RUNNING:
            self._study._storage.set_trial_state_values(trial._trial_id, state=self._states.WAITING)

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

    def _has_values(self, trial: Any) -> bool:
        return bool(trial.params.keys() >= self._distributions.keys())

    def _trial_of(self, point: Point) -> int:
        return point.number // self._values.repeats

    def _own_words(self, trial: Any) -> tuple[str, ...]:
        return tuple(f"{key}={trial.params[key]}" for key in self._distributions)
