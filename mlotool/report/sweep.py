"""A sweep as its folder tells it: its jobs, what differs between them, and its settings.

Jobs that differ in nothing but their seed are samples of one setting.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mlotool.core.errors import ConfigError, RunFileError
from mlotool.core.files import is_held
from mlotool.core.run_files import located, read_json, read_text
from mlotool.report.formats import LARGEST, NONE, SMALLEST, number, shortened
from mlotool.report.run_folder import as_dict, is_run_folder, read_run_folder

# No run writes longer texts.
MAX_ERROR, MAX_NAME, MAX_STATUS, MAX_PROBLEMS = 5_000, 200, 40, 100
# The status of a job whose decisions make no model: it was not trained, and is no failure.
INFEASIBLE = "infeasible"

ENDED = ("finished", "pruned", "failed", INFEASIBLE)


@dataclass(frozen=True)
class SweepRow:
    """One job of a sweep.

    Args:
        job: the name of its folder.
        parameters: its overrides, each value as it was written.
        status: finished, pruned, failed, infeasible, interrupted, running, or unfinished where it left no summary and
            no process holds its folder.
        objective: the key; empty where it is not known.
        value: of the objective at the best checkpoint, else the last one; None where there is none.
        metrics: the last value of each key.
        seconds: from its start to its end; None where it has not ended.
        num_ticks: that it has done; None where it left no summary.
        folder: of the job.
        error: why it failed, or makes no model; empty where neither is so.
        num_parameters: of its problems.
    """

    job: str
    parameters: Mapping[str, str]
    status: str
    objective: str
    value: float | None
    metrics: Mapping[str, float]
    seconds: float | None
    num_ticks: int | None
    folder: Path
    error: str = ""
    num_parameters: Mapping[str, int] = field(default_factory=dict)

    def number(self, key: str) -> float | None:
        """Return the last value of a metric, or of `<problem>/num_parameters`; None without one."""
        problem, _, name = key.rpartition("/")
        return self.num_parameters.get(problem) if name == "num_parameters" else self.metrics.get(key)


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep was asked for, as plan.json in its folder has it.

    Args:
        objective: the key; empty where it is not known.
        mode: "min" or "max"; empty where it is not known.
        num_jobs: how many it is to have; None where that is not known.
        num_values: how many values the sweep lists for a key; a key that is drawn from a range has none.
        log_keys: those that were drawn by their logarithm.
        repeats: jobs of a trial, with a seed each.
        second_objective: the key of a second objective; empty where there is none.
        second_mode: "min" or "max" for it.
        sampler: that draws the trials; empty in a grid.
        num_random: trials that it draws at random before it looks at results; 0 where that is not known.
        num_same: draws of points that a job has, which have none of their own.
        ending: why there are fewer jobs than were asked for; empty where there are not.
    """

    objective: str = ""
    mode: str = ""
    num_jobs: int | None = None
    num_values: Mapping[str, int] = field(default_factory=dict)
    log_keys: frozenset[str] = frozenset()
    repeats: int = 1
    second_objective: str = ""
    second_mode: str = ""
    sampler: str = ""
    num_random: int = 0
    num_same: int = 0
    ending: str = ""


PLAN_FILE = "plan.json"


def sweep_rows(sweep_dir: Path) -> list[SweepRow]:
    """Return a row for every job of a sweep, failed ones included, in the order of their numbers.

    Raises:
        ConfigError: `sweep_dir` is not the folder of a sweep.
    """
    sweep_dir = Path(sweep_dir)
    jobs = [path for path in sweep_dir.iterdir() if _is_job(sweep_dir, path)] if sweep_dir.is_dir() else []
    if not jobs and not (sweep_dir / PLAN_FILE).is_file():
        found = "a folder without jobs" if sweep_dir.is_dir() else "no such folder"
        raise ConfigError(
            f"'{sweep_dir}' is not the folder of a sweep: found {found}; expected one folder a job (0, 1, ...) "
            "with summary.json or overrides.txt in it. Give the folder outputs/<name>/multirun/<date>_<time>."
        )
    is_alive = is_held(sweep_dir / ".lock")
    return [_row(path, is_alive=is_alive) for path in sorted(jobs, key=_natural)]


def read_plan(sweep_dir: Path) -> SweepPlan:
    """Return what a sweep was asked for, as far as its folder says."""
    found = _json(sweep_dir, PLAN_FILE)
    keys = {str(key): as_dict(value) for key, value in as_dict(found.get("keys")).items()}
    search = as_dict(found.get("search"))
    second_mode = _mode(search.get("second_mode"))
    return SweepPlan(
        repeats=_whole(search.get("repeats")) or 1,
        second_objective=shortened(_text_of(search.get("second_objective")), MAX_NAME) if second_mode else "",
        second_mode=second_mode,
        sampler=shortened(_text_of(search.get("sampler")), MAX_STATUS),
        num_random=_whole(search.get("num_random")) or 0,
        num_same=_whole(search.get("num_same")) or 0,
        ending=shortened(_text_of(search.get("ending")), MAX_ERROR),
        objective=_text_of(found.get("objective")),
        mode=_mode(found.get("mode")),
        num_jobs=_whole(found.get("num_jobs")),
        num_values={key: count for key, each in keys.items() if (count := _whole(each.get("num_values")))},
        log_keys=frozenset(key for key, each in keys.items() if each.get("is_log") is True),
    )


def _is_job(sweep_dir: Path, path: Path) -> bool:
    if not path.is_dir() or path.name.startswith("."):
        return False
    try:
        located(sweep_dir, path.name)
    except RunFileError:
        return False
    # A job that died while it started has nothing but the number that the sweep gave it.
    return is_run_folder(path) or (path / "overrides.txt").is_file() or path.name.isdigit()


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _row(path: Path, *, is_alive: bool) -> SweepRow:
    summary = _json(path, "summary.json")
    objective = as_dict(summary.get("objective"))
    metrics = {str(key): _number(value) for key, value in as_dict(summary.get("metrics")).items()}
    sizes = list(as_dict(summary.get("num_parameters")).items())[:MAX_PROBLEMS]
    return SweepRow(
        job=path.name,
        parameters=_parameters(path),
        status=_status(path, summary, is_alive=is_alive),
        objective=shortened(_text_of(objective.get("key")), MAX_NAME),
        value=_number(objective.get("value")),
        metrics={key: value for key, value in metrics.items() if value is not None},
        seconds=_seconds(path, summary),
        num_ticks=_whole(summary.get("num_ticks")),
        folder=path,
        error=shortened(_text_of(summary.get("error")), MAX_ERROR),
        num_parameters={str(key): count for key, value in sizes if (count := _whole(value)) is not None},
    )


def _status(path: Path, summary: Mapping[str, Any], *, is_alive: bool) -> str:
    status = shortened(str(summary.get("status") or "unfinished"), MAX_STATUS)
    if status in ENDED:
        return status
    # A job holds its folder; one of a sweep that lives has yet to take hold of it. An interrupted one may go on.
    return "running" if is_held(path) or (is_alive and not summary) else status


def _parameters(path: Path) -> dict[str, str]:
    """Return a job's overrides, without what it takes out; before it has written them, those that it was given."""
    lines: list[Any] = _text(path, "overrides.txt").splitlines()
    if not lines:
        words = _json(path, "job.json").get("words")
        lines = words if isinstance(words, list) else []
    pairs = (str(line).strip().lstrip("+").partition("=") for line in lines)
    found = {key.strip(): value.strip() for key, sign, value in pairs if sign and not key.startswith(("~", "hydra."))}
    removed = {str(line).strip()[1:] for line in lines if str(line).startswith("~")}
    return {key: value for key, value in found.items() if key not in removed}


def _seconds(path: Path, summary: Mapping[str, Any]) -> float | None:
    if not summary:
        return None
    duration = _number(_json(path, "provenance.json").get("duration_s"))
    return duration if duration is not None else _number(summary.get("training_s"))


def _text(folder: Path, name: str) -> str:
    try:
        return read_text(folder, name) or ""
    except RunFileError:
        return ""


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_json(folder, name) or {}
    except RunFileError:
        return {}


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else ""


def _mode(value: object) -> str:
    return value if value in ("min", "max") and isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15 else None


# From this ratio of the largest to the smallest value on, a column is drawn on a log scale.
LOG_RATIO = 20
# Begins the keys of decisions.
DECISION = "decisions."

# Overrides that are looked at; no command line has as many.
MAX_KEYS = 200


@dataclass(frozen=True)
class Column:
    """One hyperparameter.

    Args:
        key: of the override.
        label: the shortest end of the key that no other column has.
        texts: each value as it was written; None where it is not known.
        is_drawn_by_logarithm: whether the sweep drew its values so.
    """

    key: str
    label: str
    texts: tuple[str | None, ...]
    is_drawn_by_logarithm: bool = False

    @property
    def numbers(self) -> tuple[float, ...] | None:
        """The values as numbers; None where one of them is none."""
        known = tuple(each for text in self.texts if (each := as_number(text)) is not None)
        return known if len(known) == len(self.texts) else None

    @property
    def names(self) -> list[str]:
        """The different values in the order in which they are drawn: numbers by size, then words."""
        different = dict.fromkeys(NONE if text is None else text for text in self.texts)

        def order(name: str) -> tuple[bool, float, str]:
            value = as_number(name)
            return (value is None, value or 0.0, name)

        return sorted(different, key=order)

    @property
    def is_log(self) -> bool:
        """Whether only a log scale shows its values as what they are."""
        numbers = self.numbers
        if not numbers or min(numbers) <= SMALLEST:
            return False
        return self.is_drawn_by_logarithm or max(numbers) >= LOG_RATIO * min(numbers)

    def take(self, indices: Sequence[int]) -> "Column":
        """Return the column of some of the settings."""
        return replace(self, texts=tuple(self.texts[index] for index in indices))


def as_number(text: str | None) -> float | None:
    """Return the number that a text is, or None; one as good as infinite is a word."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if abs(value) < LARGEST else None


def shown(text: str | None) -> str:
    """Return a value as a table shows it: numbers with four significant digits."""
    if text is None:
        return NONE
    value = as_number(text)
    return text if value is None else number(value)


def split_keys(parameters: Sequence[Mapping[str, str]]) -> tuple[list[str], dict[str, str]]:
    """Return the keys that differ between jobs, in the order of the command line, and those with one value for all.

    A job that does not say (it has only begun, or died while it started) makes nothing differ. But of jobs with
    decisions those differ that have one which others were not asked for.
    """
    keys = list(dict.fromkeys(key for each in parameters for key in each))[:MAX_KEYS]
    values: dict[str, set[str | None]] = {key: {each[key] for each in parameters if key in each} for key in keys}
    decided = [each for each in parameters if any(key.startswith(DECISION) for key in each)]
    for key in keys:
        if key.startswith(DECISION) and any(key not in each for each in decided):
            values[key].add(None)
    constants = {key: str(*found) for key, found in values.items() if len(found) == 1}
    return [key for key in keys if key not in constants], constants


def labels(keys: Sequence[str]) -> dict[str, str]:
    """Return for each key the shortest end of it that is its alone, of two parts where there are as many."""
    ends = Counter(f".{key}"[place:] for key in keys for place, sign in enumerate(f".{key}") if sign == ".")
    return {key: _label(key, ends) for key in keys}


def _label(key: str, ends: Mapping[str, int]) -> str:
    parts = key.split(".")
    # `decisions.` says no more than the table does.
    least = 1 if key.startswith(DECISION) else min(2, len(parts))
    found = (".".join(parts[-count:]) for count in range(least, len(parts)))
    return next((end for end in found if ends[f".{end}"] == 1), key)


# Jobs that a note names.
MAX_NAMED = 5


@dataclass(frozen=True)
class Setting:
    """The jobs of one choice of hyperparameters.

    Args:
        parameters: what differs between the settings, each value as it was written.
        rows: its jobs, one a seed.
        values: the objective of those that finished.
        num_planned: how many jobs it is to have.
        repeated: the names of its other jobs, each a repetition of one of `rows` with the same seed.
    """

    parameters: Mapping[str, str]
    rows: tuple[SweepRow, ...]
    values: tuple[float, ...]
    num_planned: int
    repeated: tuple[str, ...] = ()

    @cached_property
    def mean(self) -> float | None:
        """The mean objective of the jobs that finished."""
        return float(np.mean(self.values)) if self.values else None

    @cached_property
    def standard_error(self) -> float | None:
        """The standard error of the mean; None below two jobs."""
        if len(self.values) < 2:
            return None
        return float(np.std(self.values, ddof=1) / math.sqrt(len(self.values)))

    @property
    def is_complete(self) -> bool:
        """Whether all of its jobs have finished with a value."""
        return len(self.values) >= self.num_planned

    @property
    def jobs(self) -> str:
        """The names of its jobs."""
        return ", ".join(row.job for row in self.rows)

    @property
    def drawn(self) -> float | None:
        """The mean, or else that of jobs that were pruned or interrupted, for a picture that says so."""
        rest = [row.value for row in self.rows if row.value is not None and abs(row.value) < LARGEST]
        return self.mean if self.values else float(np.mean(rest)) if rest else None


@dataclass(frozen=True)
class Comparison:
    """What the jobs of a sweep say about its settings.

    Args:
        name: of the sweep.
        folder: of the sweep.
        rows: all jobs.
        plan: what was asked for.
        objective: the key that is compared.
        mode: "min" or "max"; empty where that is not known.
        columns: the hyperparameters, one value a setting.
        seed_keys: what differs between the jobs of a setting.
        constants: overrides with one value for all jobs.
        settings: in the order of their first jobs.
    """

    name: str
    folder: Path
    rows: tuple[SweepRow, ...]
    plan: SweepPlan
    objective: str
    mode: str
    columns: tuple[Column, ...]
    seed_keys: tuple[str, ...]
    constants: Mapping[str, str]
    settings: tuple[Setting, ...]

    @cached_property
    def ranked(self) -> list[Setting]:
        """The settings with a mean, the best first; those whose jobs have not all finished come after the others.

        A mean over the seeds that happened to survive is no fair rival of one over all.
        """
        sign = 1 if self.mode == "min" else -1

        def order(setting: Setting) -> tuple[bool, float]:
            return not setting.is_complete, sign * (setting.mean or 0.0)

        return sorted((each for each in self.settings if each.values), key=order)

    @cached_property
    def best(self) -> Setting | None:
        """The first of `ranked`; None where there is nothing to choose."""
        return next(iter(self.ranked), None) if len(self.settings) > 1 and self.mode else None

    @cached_property
    def best_jobs(self) -> frozenset[str]:
        """The names of the jobs of the best setting."""
        return frozenset(() if self.best is None else (row.job for row in self.best.rows))

    @property
    def ordered(self) -> list[Setting]:
        """All settings: `ranked`, and then those without a value."""
        return [*self.ranked, *(each for each in self.settings if not each.values)]

    @property
    def only(self) -> Setting | None:
        """The setting of a sweep that has but one, as one over the seed alone."""
        return self.settings[0] if len(self.settings) == 1 else None

    @property
    def direction(self) -> str:
        """Which objective is better, in words."""
        words = {"min": "smaller is better", "max": "larger is better"}
        return words.get(self.mode, "it is not known whether larger or smaller is better")

    @property
    def has_seeds(self) -> bool:
        """Whether a setting has more than one job."""
        return bool(self.seed_keys) or any(len(each.rows) > 1 for each in self.settings)

    @property
    def num_jobs(self) -> int:
        """How many jobs the sweep is to have, as far as is known."""
        return max(len(self.rows), self.plan.num_jobs or 0)

    @cached_property
    def num_ended(self) -> int:
        """How many jobs will not go on."""
        return sum(row.status in ENDED for row in self.rows)

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the values of the settings and of the choice of the best one."""
        plan, best = self.plan, self.best
        repeated = [row.job for row in self.rows if any(row.job in each.repeated for each in self.settings)]
        notes = [f"{plan.ending[:1].upper()}{plan.ending[1:]}."] if plan.ending else []
        if plan.num_same:
            notes.append(
                "1 more draw was of a point that a job has: it has the result of that job, and was not trained."
                if plan.num_same == 1
                else f"{plan.num_same} more draws were of points that jobs have: they have the results of those jobs, "
                "and were not trained."
            )
        if repeated:
            many, more = len(repeated) > 1, ", ..." if len(repeated) > MAX_NAMED else ""
            who = f"{len(repeated)} jobs have" if many else f"Job {repeated[0]} has"
            names = f": {', '.join(repeated[:MAX_NAMED])}{more}" if many else ""
            notes.append(
                f"{who} the same setting and the same seed as another job and {'are' if many else 'is'} not "
                f"counted{names}."
            )
        return notes if best is None else [*notes, *self._choice_notes(best)]

    def _choice_notes(self, best: Setting) -> list[str]:
        notes, sign = [], 1 if self.mode == "min" else -1
        leader = min(self.ranked, key=lambda each: sign * (each.mean or 0.0))
        if leader.mean != best.mean:
            notes.append(
                f"A setting with {seeds(leader)} has a better mean, {leader.mean:.4g}, but not all of its jobs have "
                f"finished: {self.describe(leader)}."
            )
        if not best.is_complete:
            notes.append(f"No setting has all of its jobs yet; the best one has {seeds(best)}.")
        equal = sum(each.mean == best.mean for each in self.ranked) - 1
        if equal:
            notes.append(f"{equal} other setting{'s have' if equal > 1 else ' has'} exactly the same value.")
        others = {row.objective for row in self.rows} - {"", self.objective}
        if others:
            notes.append(f"Jobs with another objective are not compared: {', '.join(sorted(others))}.")
        return notes

    def describe(self, setting: Setting) -> str:
        """Return a setting as the words of a command line."""
        return " ".join(self.overrides(setting))

    def overrides(self, setting: Setting) -> list[str]:
        """Return the words that make a setting; decisions that were drawn alike in all jobs are among them."""
        alike = {key: value for key, value in self.constants.items() if key.startswith(DECISION)}
        return [override(*each) for each in {**setting.parameters, **alike}.items()]


def override(key: str, value: str) -> str:
    """Return a key and its value as a word of a command line; a decision is a key that no recipe has by itself."""
    return f"{'+' if key.startswith(DECISION) else ''}{key}={value}"


def is_seed(key: str) -> bool:
    """Say whether a key is that of a seed: `seed`, or one that ends in `.seed`, such as `data.seed`."""
    return key == "seed" or key.endswith(".seed")


def seeds(setting: Setting) -> str:
    """Return how many of a setting's jobs have finished: `3 seeds`, or `2 of 3 seeds`."""
    done, planned = len(setting.values), setting.num_planned
    if done == planned:
        return f"{done} seed{'s' if done != 1 else ''}"
    return f"{done} of {planned} seed{'s' if planned != 1 else ''}"


def mean_text(setting: Setting) -> str:
    """Return a setting's mean with its standard error, to the digits that the error leaves.

    Example:
        >>> mean_text(Setting({}, (), (0.91, 0.93, 0.92), 3))
        '0.92 ± 0.0058'
    """
    error = setting.standard_error
    return number(setting.mean) if error is None else f"{number(setting.mean)} ± {error:.2g}"


def compare(sweep_dir: Path) -> Comparison:
    """Read a sweep's folder and group its jobs by all that differs but the seed.

    Raises:
        ConfigError: `sweep_dir` is not the folder of a sweep.
    """
    sweep_dir = Path(sweep_dir)
    rows, plan = tuple(sweep_rows(sweep_dir)), read_plan(sweep_dir)
    differing, constants = split_keys([row.parameters for row in rows])
    seed_keys = tuple(key for key in differing if is_seed(key))
    own = [key for key in differing if not is_seed(key)]
    objective, mode = _objective(rows, plan)
    planned = max(plan.repeats, math.prod(plan.num_values.get(key, 1) for key in plan.num_values if is_seed(key)))
    settings = _settings(rows, own, objective, planned)
    columns = tuple(
        Column(key, label, tuple(each.parameters.get(key) for each in settings), key in plan.log_keys)
        for key, label in labels(own).items()
    )
    # outputs/<name>/multirun/<date>_<time>
    path = sweep_dir.resolve()
    name = path.parent.parent.name if path.parent.name == "multirun" else path.name
    return Comparison(name, sweep_dir, rows, plan, objective, mode, columns, seed_keys, constants, settings)


def _objective(rows: Sequence[SweepRow], plan: SweepPlan) -> tuple[str, str]:
    """Return the key that is compared, and its direction: as the jobs say, else as the sweep was asked for."""
    said = [row for row in rows if row.objective]
    same = [row for row in said if row.objective == plan.objective]
    for row in (same or said or [row for row in rows if is_run_folder(row.folder)])[:1]:
        found = read_run_folder(row.folder).objective
        mode = str(found["mode"] or (plan.mode if found["key"] == plan.objective else ""))
        return str(found["key"] or plan.objective or "objective"), mode
    return plan.objective or "objective", plan.mode


def counts(row: SweepRow, objective: str) -> bool:
    """Say whether a job's value is one that settings are compared by."""
    is_comparable = row.status == "finished" and row.objective == objective
    return is_comparable and row.value is not None and abs(row.value) < LARGEST


def _settings(rows: Sequence[SweepRow], keys: Sequence[str], objective: str, planned: int) -> tuple[Setting, ...]:
    groups: dict[tuple[str | None, ...], list[SweepRow]] = {}
    for row in rows:
        # Of a job that does not say what it is, nothing can be told.
        if row.parameters:
            groups.setdefault(tuple(row.parameters.get(key) for key in keys), []).append(row)
    return tuple(
        _setting(
            {key: group[0].parameters[key] for key in keys if key in group[0].parameters}, group, objective, planned
        )
        for group in groups.values()
    )


def _setting(parameters: Mapping[str, str], jobs: Sequence[SweepRow], objective: str, planned: int) -> Setting:
    # A study may draw a setting with the same seed again: that is the same run, and no further sample.
    by_seed: dict[tuple[tuple[str, str], ...], SweepRow] = {}
    for row in jobs:
        seed = tuple(sorted((key, text) for key, text in row.parameters.items() if is_seed(key)))
        if seed not in by_seed or counts(row, objective) or not counts(by_seed[seed], objective):
            by_seed[seed] = row
    kept = {row.job for row in by_seed.values()}
    rows = tuple(row for row in jobs if row.job in kept)
    values = tuple(row.value for row in rows if counts(row, objective) and row.value is not None)
    repeated = tuple(row.job for row in jobs if row.job not in kept)
    return Setting(parameters, rows, values, max(planned, len(rows)), repeated)
