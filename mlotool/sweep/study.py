"""Optuna chooses the points: one trial a job, kept in a database in the sweep's folder."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from mlotool.config.sweep_plan import SweepPlan
from mlotool.core.errors import ConfigError, InfeasibleModelError, MlotoolError, RunError
from mlotool.core.messages import did_you_mean
from mlotool.sweep import trials
from mlotool.sweep.folder import STUDY_FILE, study_name
from mlotool.sweep.job_folder import ENDED, JobOutcome, read_numbers, read_outcome
from mlotool.sweep.points import AbstractPoints, Group, GroupRecord, Point
from mlotool.sweep.storage import check_own_study, import_optuna, open_storage, storing
from mlotool.sweep.study_options import make_pruner, make_study_sampler, sampler_options
from mlotool.sweep.trials import MOST_IN_A_ROW, SamePoints, check_values, reason_of


def _objectives(folders: Sequence[Path], second: str | None) -> list[float] | None:
    """Return the objectives of a trial whose jobs have ended, their means; None where a job has no number.

    Args:
        folders: of its jobs.
        second: the key of the second objective; None where there is one.

    Raises:
        RunError: a job that has finished has no value of the second objective.
    """
    rows = []
    for folder in folders:
        outcome, numbers = read_outcome(folder), read_numbers(folder)
        if outcome.status != "finished":
            return None
        if second is not None and numbers.get(second) is None:
            raise RunError(
                f"sweep.second_objective: found {second}, which {folder} has not; expected one of "
                f"{', '.join(numbers) or 'the keys of its summary.json'}.{did_you_mean(second, numbers)} Start the "
                "sweep again with that key."
            )
        rows.append([outcome.value, *([] if second is None else [numbers[second]])])
    means = [fmean(math.nan if value is None else value for value in column) for column in zip(*rows, strict=True)]
    return None if any(map(math.isnan, means)) else means


def check_study(plan: SweepPlan, *, has_decisions: bool) -> dict[str, Any]:
    """Return what the trials of a search are drawn from.

    Raises:
        ConfigError: there is no one objective for all jobs, or nothing to search; or repetitions, and a seed that is.
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
    if plan.settings["repeats"] > 1 and any(dimension.key == "seed" for dimension in plan.dimensions):
        raise ConfigError(
            f"sweep.repeats: found {plan.settings['repeats']} beside a seed that is searched; expected one of the two, "
            "as each repetition has a seed of its own. Leave seed out."
        )
    return trials.distributions_of(plan)


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
    before = [direction.name.lower() for direction in study.directions]
    if before != list(directions):
        raise ConfigError(
            f"resume: found a study {url} that is to {' and '.join(before)} {plan.objective}; expected one "
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
        optuna, settings = import_optuna(), plan.settings
        self._optuna, self._states = optuna, optuna.trial.TrialState
        self._folder, self._make_decisions = folder, draw
        self._distributions = check_study(plan, has_decisions=draw is not None)
        self._repeats, self._second = settings["repeats"], settings["second_objective"]
        modes = [plan.mode, *([] if self._second is None else [settings["second_objective_mode"]])]
        directions = ["maximize" if mode == "max" else "minimize" for mode in modes]
        self._fixed_seed, self._sampler, self._group_size = plan.seed, settings["sampler"], plan.group_size
        if not settings["storage"]:
            check_own_study(folder, STUDY_FILE, settings["sampler"])
        self._url = settings["storage"] or f"sqlite:///{folder / STUDY_FILE}"
        self._watched = {
            "url": self._url,
            "name": study_name(folder),
            "pruner": settings["pruner"],
            "pruner_options": dict(settings["pruner_options"]),
        }
        pruner = make_pruner(settings["pruner"], settings["pruner_options"])
        is_found = not settings["storage"] and (folder / STUDY_FILE).exists()
        with self._reading() if is_found else storing(self._url):
            self._study = optuna.create_study(
                storage=open_storage(self._url),
                study_name=self._watched["name"],
                directions=directions,
                pruner=pruner,
                load_if_exists=True,
            )
            _check_found(self._study, directions, plan, self._url, is_resumed=record.is_resumed)
            self._num_planned = self.total = settings["num_trials"] * self._repeats
            # Jobs that were given to be run, by this process or an earlier one that saw them end; of these, those that
            # were interrupted; and how many draws of known points came one after the other, at last.
            self._num_given = self._num_interrupted = self._num_same_in_a_row = 0
            self._same = SamePoints(optuna, self._study)
            self._begun, self._waiting = self._take_up(folder, record)
        if self._study.user_attrs.get(_ALL_TRIED) is True:
            self._end(_ALL_TRIED_TEXT)
        options = sampler_options(plan, has_decisions=draw is not None)
        self._study.sampler = make_study_sampler(settings["sampler"], options, settings["seed"])

    def next(self) -> Group | None:
        """Return jobs that died, or else new ones; the jobs of a trial stay together as far as a group has room."""
        if self._begun and self._num_given < self.total:
            self._num_given += len(self._begun[0].waiting)
            return self._begun.pop(0)
        points: list[Point] = []
        while more := self._of_one_trial(self._group_size - len(points), is_first=not points):
            points += more
            self._num_given += len(more)
        return Group(tuple(points)) if points else None

    def _of_one_trial(self, room: int, *, is_first: bool) -> list[Point]:
        """Return jobs of one trial, all that are left of it or as many as a group takes; none without room for all."""
        if self._num_given >= self.total or (not self._waiting and not is_first and room < self._repeats):
            return []
        if not self._waiting:
            self._waiting = self._new_trial()
        same = [point for point in self._waiting if self._trial_of(point) == self._trial_of(self._waiting[0])]
        if len(same) > room and not is_first:
            return []
        self._waiting = self._waiting[len(same[:room]) :]
        return same[:room]

    def _new_trial(self) -> list[Point]:
        """Return the jobs of the next trial whose point is new; none where all draws are of known points."""
        while self._num_same_in_a_row < MOST_IN_A_ROW and self._num_given < self.total:
            if points := self._jobs_of_next_draw():
                self._num_same_in_a_row = 0
                return points
        # From what runs the sampler may learn to draw other points.
        are_running = self._num_given > self.num_ended + self._num_interrupted
        if self._num_same_in_a_row >= MOST_IN_A_ROW and not are_running:
            reason = f"the last {self._num_same_in_a_row} draws were all of known points"
            if self._num_interrupted:
                reason += f", of which {self._num_interrupted} jobs were interrupted. They go on, and the search with "
                reason += "them: the same command with resume=auto"
            else:
                reason += f": each was tried, or sweep.sampler={self._sampler} draws no others any more"
            self._end(reason)
        return []

    def _jobs_of_next_draw(self) -> list[Point]:
        """Return the jobs of the next trial; none where its point is known."""
        # A queued trial says nothing of what the sampler has left to draw.
        is_queued = bool(self._study.get_trials(deepcopy=False, states=(self._states.WAITING,)))
        trial, refused = self._ask()
        first = self._same.first(trial)
        if first is not None:
            self.num_same += 1
            self._num_same_in_a_row += 1
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
                trial.set_user_attr(trials.INFEASIBLE, refused[: trials.MAX_REASON])
                self._study.tell(trial.number, state=self._states.FAIL)
            elif self._make_decisions is not None:
                trial.set_user_attr(trials.DRAWN, True)
        return points

    def _ask(self) -> tuple[Any, str | None]:
        """Return a trial with its values and decisions, and why they make no model, if so."""
        with warnings.catch_warnings():
            # Samplers that are experimental in Optuna say so each time.
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            with storing(self._url):
                trial = trials.ask(self._study, self._distributions)
            with self._reading():
                # One that was queued, or half drawn, may have values of anybody's.
                check_values(trial, self._distributions)
            try:
                if self._make_decisions is not None:
                    trials.make_all(trial, self._make_decisions, self._own_words(trial), storing(self._url))
            except InfeasibleModelError as error:
                return trial, str(error)
            except ConfigError:
                # Values that are drawn may be wrong: the job fails, and says so.
                pass
        return trial, None

    def finish(self, point: Point, outcome: JobOutcome) -> None:
        """Tell the study, once all jobs of a trial have ended; one that was interrupted stays as it is, to go on."""
        if outcome.status not in ENDED:
            self._num_interrupted += 1
            return
        # From a job that has ended the sampler may learn to draw other points.
        self.num_ended, self._num_same_in_a_row = self.num_ended + 1, 0
        if point.refused is not None:
            return
        number = self._trial_of(point)
        folders = [self._folder / str(job) for job in range(number * self._repeats, (number + 1) * self._repeats)]
        statuses = {read_outcome(folder).status for folder in folders}
        is_told = self._repeats > 1 and self._study.get_trials(deepcopy=False)[number].state.is_finished()
        if is_told or not statuses <= {*ENDED}:
            return
        values = _objectives(folders, self._second)
        with self._telling():
            if values is not None:
                self._study.tell(number, values)
            elif "pruned" in statuses:
                self._study.tell(number, state=self._states.PRUNED)
            else:
                if "failed" not in statuses:
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
        with storing(self._url):
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
        self.total = self._num_given + begun + len(self._waiting) + num_more
        if self.total < self._num_planned:
            self.ending = f"the search ends with {self.total} of {self._num_planned} jobs: {reason}"

    def _take_up(self, folder: Path, record: GroupRecord) -> tuple[list[Group], list[Point]]:
        """Count the jobs of an earlier process; return the groups that it left unfinished, and single jobs."""
        points: dict[int, Point] = {}
        waiting: dict[int, Point] = {}
        for trial in self._study.get_trials():
            if self._same.take_up(trial):
                self.num_same += 1
                continue
            refused, is_over = reason_of(trial), trial.state.is_finished()
            is_whole = refused is not None or trials.is_drawn(trial, self._make_decisions is not None)
            has_values = trial.params.keys() >= self._distributions.keys()
            if not is_whole or not has_values or trial.state == self._states.WAITING:
                if trial.state == self._states.RUNNING:
                    # Its process died while it was drawn: the next draw gives it what it lacks. It is not marked as
                    # failed, as brute force takes the values of a trial that has ended for all that such a trial has.
                    self._study._storage.set_trial_state_values(trial._trial_id, state=self._states.WAITING)
                continue
            if not is_over and refused is not None:
                self._study.tell(trial.number, state=self._states.FAIL)
            jobs, first = self._points(trial, refused), self._same.first(trial)
            if not is_over and first is not None and not any((folder / str(job.number)).exists() for job in jobs):
                self._same.repeat(trial.number, first)
                self.num_same += 1
                continue
            self._same.add(trial)
            points |= {point.number: point for point in jobs}
            if is_over and refused is None:
                self._num_given += len(jobs)
                self.num_ended += len(jobs)
                continue
            check_values(trial, self._distributions)
            for point in jobs:
                outcome = read_outcome(folder / str(point.number))
                if outcome.status in ENDED:
                    # The job ended, and the sweep died before it took note.
                    self._num_given += 1
                    self.finish(point, outcome)
                else:
                    waiting[point.number] = point
        groups = record.groups(points, waiting)
        for number in frozenset().union(*(group.ended for group in groups)):
            check_values(self._study.get_trials(deepcopy=False)[number // self._repeats], self._distributions)
        taken = {point.number for group in groups for point in group.points}
        return groups, [point for number, point in waiting.items() if number not in taken]

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
        words = (*self._own_words(trial), *trials.words_of(trial, without=self._distributions))
        if self._repeats == 1:
            # A job may be stopped because others do better where one objective says so.
            study = {**self._watched, "trial": trial.number} if self._second is None else None
            return [Point(trial.number, words, study, refused)]
        first = trial.number * self._repeats
        return [
            Point(first + number, (*words, f"seed={self._fixed_seed + number}"), None, refused)
            for number in range(self._repeats)
        ]

    def _trial_of(self, point: Point) -> int:
        return point.number // self._repeats

    def _own_words(self, trial: Any) -> tuple[str, ...]:
        return tuple(f"{key}={trial.params[key]}" for key in self._distributions)
