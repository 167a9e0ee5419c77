"""Optuna chooses the points: one trial a job, kept in a database in the sweep's folder."""

import json
import math
import random
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from mlotool.config.run_config import decision_faults
from mlotool.config.sweeps.sweep_plan import Dimension, SweepPlan
from mlotool.core.errors import ConfigError, InfeasibleModelError, MlotoolError, RunError
from mlotool.core.messages import did_you_mean
from mlotool.folders.run_folder import ENDED, INFEASIBLE
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.sweep import study_options
from mlotool.sweep.folder import JobOutcome, read_numbers, read_outcome
from mlotool.sweep.points import AbstractPoints, Group, GroupRecord, Point
from mlotool.sweep.study_options import import_optuna, make_pruner, open_storage, storing


def ask(study: Any, distributions: dict[str, Any]) -> Any:
    """Return the next trial, a queued one first, with a value from each distribution."""
    trial = study.ask()
    for name, distribution in distributions.items():
        _suggest(trial, name, distribution)
    return trial


def _suggest(trial: Any, name: str, distribution: Any) -> Any:
    """Return a trial's value; where it was queued with one that is none of the distribution, that is drawn instead."""
    from mlotool.sweep.samplers.base import contains

    queued = trial._fixed_params
    if name in queued and not contains(distribution, queued[name]):
        warnings.warn(
            f"trial {trial.number} was queued with {name}={str(queued.pop(name))[:100]}, which this sweep does not "
            "have; the value is drawn instead.",
            stacklevel=2,
        )
    # `study.ask(distributions)` does the same.
    return trial._suggest(name, distribution)


PREFIX = "decisions."
DRAWN, _UNASKED = "drawn", "unasked"
# Of the trial that has the values of the recipe.
_IS_RECIPE = "recipe"
MAX_REASON = 2_000
# Words that are no text to Hydra.
_OTHER_VALUES = ("null", "true", "false", "nan", "inf")


def make_all(trial: Any, draw: Any, words: Sequence[str], storing: Any) -> None:
    """Ask a trial for all decisions of its models, and note which of the recipe's they do not ask for.

    Args:
        trial: of Optuna.
        draw: asks for them, as the models are built.
        words: of the job.
        storing: wraps what writes into the study, as what builds the models takes errors that are not ours for theirs.
    """
    drawn = draw(words, storing(partial(suggest, trial, {})))
    unasked = [name for name, value in drawn.items() if value is None]
    if unasked != _unasked(trial):
        storing(trial.set_user_attr)(_UNASKED, unasked)


def suggest(trial: Any, decided: dict[str, Any], name: str, candidates: tuple[Any, ...]) -> Any:
    """Ask a trial for a decision; asked again, it answers the same.

    Args:
        trial: of Optuna.
        decided: what it has answered.
        name: of the decision.
        candidates: names, or whole numbers; those of a range are drawn as numbers, so that their count may change.

    Raises:
        RunError: the decision had other names to choose from in an earlier trial.
    """
    if name not in decided:
        kinds, whole = import_optuna().distributions, all(type(candidate) is int for candidate in candidates)
        if whole and candidates == tuple(range(candidates[0], candidates[-1] + 1)):
            distribution = kinds.IntDistribution(candidates[0], candidates[-1])
        else:
            distribution = kinds.CategoricalDistribution(candidates)
        try:
            decided[name] = _suggest(trial, f"{PREFIX}{name}", distribution)
        except MlotoolError:
            raise
        except ValueError as error:
            raise RunError(
                f"decisions.{name}: found the candidates {', '.join(map(str, candidates))[:300]}, which differ from "
                f"those in an earlier trial of the sweep ({error}); expected the same names each time. Add what they "
                "depend on to the decision's name, choose(f'extra_{depth}', ..), or decide by a whole number, "
                "choose(name, range(n)). Then repeat the command with resume=auto."
            ) from error
    return decided[name]


def words_of(trial: Any, without: Container[str] = ()) -> tuple[str, ...]:
    """Return the decisions of a trial as overrides, but for some keys; those that it does not ask for are taken out."""
    made = (f"{key}={_word(value)}" for key, value in _decisions(trial) if key not in without)
    return (*made, *(f"~{PREFIX}{name}" for name in _unasked(trial)))


def is_drawn(trial: Any, has_decisions: bool) -> bool:
    """Say whether a trial has all of its decisions."""
    return not has_decisions or trial.user_attrs.get(DRAWN) is True


def reason_of(trial: Any) -> str | None:
    """Return why a trial's decisions make no model; None where they make one."""
    return str(trial.user_attrs[INFEASIBLE])[:MAX_REASON] if INFEASIBLE in trial.user_attrs else None


def _decisions(trial: Any) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in trial.params.items() if key.startswith(PREFIX))


def _unasked(trial: Any) -> list[str]:
    names = trial.user_attrs.get(_UNASKED, [])
    return [str(name) for name in names] if isinstance(names, list) else []


def _word(value: Any) -> str:
    """Return a name as a word of Hydra's that is this text and nothing else."""
    is_plain = type(value) is int or (str(value)[:1].isalpha() and value not in _OTHER_VALUES)
    return str(value) if is_plain else json.dumps(value)


def distributions_of(plan: SweepPlan) -> dict[str, Any]:
    """Return what the value of each key of a sweep is drawn from.

    Raises:
        ConfigError: an interval of real numbers, of which each value is to be tried.
    """
    for dimension in plan.dimensions if plan.settings["sampler"] == "brute_force" else ():
        if dimension.low is not None and not dimension.whole and dimension.step is None:
            raise ConfigError(
                f"{dimension.key}: found an interval with sweep.sampler=brute_force, which tries every value; expected "
                f"choices, or a range with a step. Write {dimension.key}=0.01,0.1, or choose another sampler."
            )
    return {dimension.key: _distribution(dimension) for dimension in plan.dimensions}


def check_values(trial: Any, distributions: Mapping[str, Any]) -> None:
    """Refuse values that the command line does not have, and decisions that are none: they become words of a job's.

    Raises:
        ValueError: with what is wrong.
    """
    for key, distribution in distributions.items():
        if not isinstance(trial.number, int) or trial.distributions[key] != distribution:
            raise ValueError(f"its trial {trial.number} draws {key} from {trial.distributions[key]}"[:300])
        value = distribution.to_internal_repr(trial.params[key])
        if not distribution._contains(value) or trial.params[key] != distribution.to_external_repr(value):
            raise ValueError(f"its trial {trial.number} has {key}={trial.params[key]!r}"[:300])
    decisions = {key.removeprefix(PREFIX): value for key, value in _decisions(trial)}
    faults = list(decision_faults({"decisions": {**dict.fromkeys(_unasked(trial), 0), **decisions}}))
    if faults:
        raise ValueError(f"its trial {trial.number}: {faults[0]}"[:300])


def _distribution(dimension: Dimension) -> Any:
    kinds = import_optuna().distributions
    if dimension.low is None or dimension.high is None:
        return kinds.CategoricalDistribution(dimension.choices)
    if dimension.whole:
        step = int(dimension.step or 1)
        return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


# The values of a trial by their names.
Values = frozenset[tuple[str, Any]]

# A sampler that has drawn so many known points in a row is taken to have no others.
MOST_IN_A_ROW = 100

_SAME, _NO_VALUE = "same_as_trial", "has_no_value"


class SamePoints:
    """Knows which points of a study have jobs, and which trials wait for the results of those jobs.

    A run is deterministic: with the same values and the same seed it has the same result. The sampler's history is as
    if each trial had been trained.

    Args:
        optuna: the package.
        study: its study, whose trials have the numbers of their places.
    """

    def __init__(self, optuna: Any, study: Any) -> None:
        self._study, self._states = study, optuna.trial.TrialState
        self._first: dict[Values, int] = {}
        self._waiting: dict[int, list[int]] = {}

    def first(self, trial: Any) -> int | None:
        """Return the number of the trial that has jobs of this one's point; None where there is none."""
        return self._first.get(_point(trial))

    def add(self, trial: Any) -> None:
        """Take note of a trial that has jobs of its own; one whose job has crashed may be tried again."""
        if not self._has_crashed(self._trial(trial.number)):
            self._first.setdefault(_point(trial), trial.number)

    def note_no_value(self, number: int) -> None:
        """Take note that the jobs of a trial have ended without a value, as they would again: they diverged."""
        self._set_attribute(number, _NO_VALUE, True)

    def repeat(self, number: int, first: int) -> None:
        """Give a trial the result of the first one of its point, as soon as there is one."""
        self._set_attribute(number, _SAME, first)
        self._waiting.setdefault(first, []).append(number)
        self.pass_on(first)

    def take_up(self, trial: Any) -> bool:
        """Say whether a trial of an earlier process has the point of another one, for which it then waits again.

        Raises:
            ValueError: there is no such other trial.
        """
        if not is_copy(trial):
            return False
        first = trial.user_attrs[_SAME]
        if type(first) is not int or not 0 <= first < trial.number:
            raise ValueError(f"its trial {trial.number} has the point of trial {first!r}"[:300])
        if not trial.state.is_finished():
            self.repeat(trial.number, first)
        return True

    def pass_on(self, number: int) -> None:
        """Give the result of a trial to those that wait for it, if it has ended.

        Values that it reported while it ran are left out, as pruners would compare jobs with each copy of them. The
        last value of a pruned trial is copied: samplers (TPE, CMA-ES, ours) read it as its result, and pruners look at
        no pruned trial.
        """
        first = self._trial(number)
        if not first.state.is_finished():
            return
        if self._has_crashed(first):
            self._first.pop(_point(first), None)
        for copy in self._waiting.pop(number, []):
            if first.state == self._states.COMPLETE:
                self._study.tell(copy, first.values)
                continue
            if first.state == self._states.PRUNED and first.last_step is not None:
                last, identity = first.intermediate_values[first.last_step], self._trial(copy)._trial_id
                self._study._storage.set_trial_intermediate_value(identity, first.last_step, last)
            self._study.tell(copy, state=first.state)

    def _trial(self, number: int) -> Any:
        return self._study.get_trials(deepcopy=False)[number]

    def _set_attribute(self, number: int, key: str, value: Any) -> None:
        # An `optuna.Trial` can do it too, but to make one draws from the sampler, of which some keep count.
        self._study._storage.set_trial_user_attr(self._trial(number)._trial_id, key, value)

    def _has_crashed(self, trial: Any) -> bool:
        is_known = reason_of(trial) is not None or _NO_VALUE in trial.user_attrs
        return trial.state == self._states.FAIL and not is_known


def is_copy(trial: Any) -> bool:
    """Say whether a trial has the point of another one, and so no job of its own."""
    return _SAME in trial.user_attrs


def _point(trial: Any) -> Values:
    return frozenset(trial.params.items())


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
                f"sweep.second_objective: found {second}, which {folder} has not logged; expected one of "
                f"{', '.join(numbers)}.{did_you_mean(second, numbers)} Start the sweep again with that key."
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
        raise ConfigError("objective: found null with sweep=optuna; expected a logged key. Set objective=val/accuracy.")
    if plan.mode is None:
        raise ConfigError(
            f"objective: found '{plan.objective}' in a search that varies the objective or its mode. Leave these out "
            "of the search."
        )
    if not plan.dimensions and not has_decisions:
        raise ConfigError(
            "sweep.params: found nothing to search; expected choices or ranges. Write 'problems.<name>.optimizer.lr="
            "tag(log, interval(1e-3, 1e-1))', or give a problem a module of _target_: mlotool.spaces.Space."
        )
    if plan.settings["repeats"] > 1 and any(dimension.key == "seed" for dimension in plan.dimensions):
        raise ConfigError(
            f"sweep.repeats: found {plan.settings['repeats']} beside a seed that is searched; expected one of the two."
        )
    return distributions_of(plan)


def _check_found(study: Any, directions: Sequence[str], plan: SweepPlan, url: str, *, is_resumed: bool) -> None:
    """Refuse the study of another sweep, or one that looks for other values.

    Sweeps that share a database name theirs by their folders.
    """
    num_begun = sum(trial.state.name != "WAITING" for trial in study.get_trials(deepcopy=False))
    if num_begun and not is_resumed:
        raise ConfigError(
            f"sweep.storage: found a study '{study.study_name}' with {num_begun} trials in {url}; expected no study "
            "with the name of the sweep's folder. Choose another hydra.sweep.dir, or go on with that sweep: "
            "resume=<its folder>."
        )
    before = [direction.name.lower() for direction in study.directions]
    if before != list(directions):
        raise ConfigError(
            f"resume: found a study {url} with other objectives: to {' and '.join(before)} {plan.objective}. Leave "
            "resume out."
        )


# What a study is marked with once brute force has nothing left to try.
_ALL_TRIED = "all_tried"

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
            study_options.check_own_study(folder, SweepFolder.STUDY, settings["sampler"])
        self._url = settings["storage"] or f"sqlite:///{folder / SweepFolder.STUDY}"
        pruning = {"pruner": settings["pruner"], "pruner_options": study_options.pruner_options(plan)}
        self._watched = {"url": self._url, "name": SweepFolder(folder).study_name(), **pruning}
        # Before there is a study: options, and first settings, may be refused.
        first = plan.first_settings()
        pruner = make_pruner(settings["pruner"], pruning["pruner_options"])
        options = study_options.sampler_options(plan, has_decisions=draw is not None)
        sampler = study_options.make_study_sampler(settings["sampler"], options, settings["seed"])
        is_found = not settings["storage"] and (folder / SweepFolder.STUDY).exists()
        with self._reading() if is_found else storing(self._url):
            self._study = optuna.create_study(
                storage=open_storage(self._url),
                study_name=self._watched["name"],
                directions=directions,
                pruner=pruner,
                load_if_exists=True,
            )
            _check_found(self._study, directions, plan, self._url, is_resumed=record.is_resumed)
            if not self._study.get_trials(deepcopy=False):
                self._queue_first(plan, first)
            self._num_planned = self.total = settings["num_trials"] * self._repeats
            # Jobs that were given to be run, by this process or an earlier one that saw them end; of these, those that
            # were interrupted; and how many draws of known points came one after the other, at last.
            self._num_given = self._num_interrupted = self._num_same_in_a_row = 0
            self._same = SamePoints(optuna, self._study)
            self._begun, self._waiting = self._take_up(folder, record)
        if self._study.user_attrs.get(_ALL_TRIED) is True:
            self._end(_ALL_TRIED_TEXT)
        self._study.sampler = sampler

    def _queue_first(self, plan: SweepPlan, first: Sequence[dict[str, Any]]) -> None:
        """Queue what is tried first: the recipe's own values, those of the user's, and draws around a good guess."""
        settings = plan.settings
        for number, values in enumerate(first):
            is_recipe = number == 0 and settings["recipe_first"] and plan.config is not None
            if is_recipe:
                values |= self._first_decisions(values)
                # A value that is out of its range is drawn.
                is_recipe = bool(values) and all(dimension.key in values for dimension in plan.dimensions)
            # What is not among them is drawn.
            self._study.enqueue_trial(values, user_attrs={_IS_RECIPE: True} if is_recipe else None)
        guessed = [dimension for dimension in plan.dimensions if dimension.around is not None]
        if not guessed:
            return
        num_random = study_options.num_random_trials(settings["sampler"], settings["sampler_options"])
        is_random = settings["sampler"] in ("random", "qmc", "brute_force")
        for number in range(len(first), settings["num_trials"] if is_random else num_random):
            generator = random.Random(f"{settings['seed']} trial {number}")
            drawn = {dimension.key: dimension.drawn(generator) for dimension in guessed}
            whole = {dimension.key for dimension in guessed if dimension.whole}
            self._study.enqueue_trial({key: int(value) if key in whole else value for key, value in drawn.items()})

    def _first_decisions(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first candidates of all decisions; nothing where these make no model."""
        words = [f"{key}={value}" for key, value in values.items()]
        try:
            drawn = {} if self._make_decisions is None else self._make_decisions(words, lambda _, names: names[0])
        except ConfigError:
            return {}
        return {f"{PREFIX}{name}": value for name, value in drawn.items() if value is not None}

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
            reason = f"all were tried, or sweep.sampler={self._sampler} no longer draws others"
            if self._num_interrupted:
                reason = f"of which {self._num_interrupted} jobs were interrupted, which go on with resume=auto"
            reason = f"the last {self._num_same_in_a_row} draws were settings that were tried before, {reason}"
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
                trial.set_user_attr(INFEASIBLE, refused[:MAX_REASON])
                self._study.tell(trial.number, state=self._states.FAIL)
            elif self._make_decisions is not None:
                trial.set_user_attr(DRAWN, True)
        return points

    def _ask(self) -> tuple[Any, str | None]:
        """Return a trial with its values and decisions, and why they make no model, if so."""
        with warnings.catch_warnings():
            # Samplers that are experimental in Optuna say so each time.
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            with storing(self._url):
                trial = ask(self._study, self._distributions)
            with self._reading():
                # One that was queued, or half drawn, may have values of anybody's.
                check_values(trial, self._distributions)
            try:
                if self._make_decisions is not None:
                    make_all(trial, self._make_decisions, self._own_words(trial), storing(self._url))
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
            is_whole = refused is not None or is_drawn(trial, self._make_decisions is not None)
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
                f"resume: found a study in {self._folder} that does not belong to this sweep ({type(error).__name__}: "
                f"{reason}); expected the study of the same command. Leave resume out for a new sweep."
            ) from error

    def _points(self, trial: Any, refused: str | None = None) -> list[Point]:
        """Return the jobs of a trial."""
        # A decision that the command line varies is a word as it stands there.
        words = (*self._own_words(trial), *words_of(trial, without=self._distributions))
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


class Watcher:
    """Reports a job's objective to its trial, and asks whether to go on.

    The trial of the recipe's own values always goes on, so that no search ends with less than the recipe reaches.

    Args:
        url: of the database.
        name: of the study.
        trial: its number.
        pruner: as in `sweep.pruner`.
        pruner_options: as in `sweep.pruner_options`.
    """

    def __init__(self, url: str, name: str, trial: int, pruner: str, pruner_options: Mapping[str, Any]) -> None:
        optuna, self._url = import_optuna(), url
        self._study = _study(url, name, pruner, json.dumps(dict(pruner_options), sort_keys=True))
        [own] = (other for other in self._study.get_trials(deepcopy=False) if other.number == trial)
        self._trial = optuna.trial.Trial(self._study, own._trial_id)
        self._is_recipe = bool(own.user_attrs.get(_IS_RECIPE))

    def __call__(self, tick: int, value: float) -> bool:
        """Report; return whether the job is to end.

        NaN is no value: to a pruner it would be worse than every other one, whatever came before.
        """
        if math.isnan(value):
            return False
        with storing(self._url):
            with warnings.catch_warnings():
                # A trial that goes on from a checkpoint reports the ticks since then again.
                warnings.filterwarnings("ignore", message=".*reported value is ignored.*")
                self._trial.report(value, tick)
            return not self._is_recipe and bool(self._trial.should_prune())


# The jobs of a process report to one study, whose database takes longer to open than to report to.
@lru_cache(maxsize=1)
def _study(url: str, name: str, pruner: str, pruner_options: str) -> Any:
    from optuna.study import Study

    class WithoutCopies(Study):
        """Shows a pruner the trials that have jobs: it counts them, and compares a job with each."""

        def get_trials(self, *args: Any, **kwargs: Any) -> list[Any]:
            return [trial for trial in super().get_trials(*args, **kwargs) if not is_copy(trial)]

    return WithoutCopies(name, open_storage(url), pruner=make_pruner(pruner, json.loads(pruner_options)))
