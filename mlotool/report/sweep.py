"""A sweep as its folder tells it: its jobs, what differs between them, its settings, and what ran as one program.

Jobs that differ in nothing but their seed are samples of one setting.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic import dataclasses as validated

from mlotool.config.sweeps.population import Population, Settings
from mlotool.core.errors import ConfigError, RunFileError
from mlotool.folders.run_folder import ENDED, RunFolder
from mlotool.folders.safe_files import read_text
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.report.formats import LARGEST, NONE, SMALLEST, number, shortened
from mlotool.report.recorded_run import RecordedRun, as_dict

# No run writes longer texts.
MAX_ERROR, MAX_NAME, MAX_STATUS = 5_000, 200, 40
# The status of a job whose decisions make no model: it was not trained, and is no failure.


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
        other_splits: the objective's metric on other splits, as `test/accuracy`, at the same checkpoint as `value`.
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
    other_splits: Mapping[str, float] = field(default_factory=dict)

    def number(self, key: str) -> float | None:
        """Return the last value of a metric, or of `<problem>/num_parameters`; None without one."""
        problem, _, name = key.rpartition("/")
        return self.num_parameters.get(problem) if name == "num_parameters" else self.metrics.get(key)


Mode = Literal["min", "max", ""]
Count = Annotated[int, Field(ge=0, lt=10**15)]


@validated.dataclass(frozen=True)
class SweptKey:
    """A key of a sweep: how many values are listed for it (none for one that is drawn), and whether on a log scale."""

    num_values: Count = 0
    is_log: bool = False


@validated.dataclass(frozen=True)
class PlanFile:
    """What a sweep was asked for, as plan.json in its folder has it.

    Args:
        objective: the key; empty where it is not known.
        mode: "min" or "max"; empty where it is not known.
        num_jobs: how many it is to have; 0 where that is not known.
        keys: what it varies.
        repeats: jobs of a trial, with a seed each.
        second_objective: the key of a second objective; empty where there is none.
        second_mode: "min" or "max" for it.
        sampler: that draws the trials; empty in a grid.
        num_random: trials that it draws at random before it looks at results.
        num_same: draws of points that a job has, which have none of their own.
        ending: why there are fewer jobs than were asked for; empty where there are not.
    """

    objective: str = ""
    mode: Mode = ""
    num_jobs: Count = 0
    keys: Mapping[str, SweptKey] = field(default_factory=dict)
    repeats: Annotated[Count, Field(ge=1)] = 1
    second_objective: Annotated[str, Field(max_length=200)] = ""
    second_mode: Mode = ""
    sampler: str = ""
    num_random: Count = 0
    num_same: Count = 0
    ending: str = ""


def sweep_rows(sweep_dir: Path) -> list[SweepRow]:
    """Return a row for every job of a sweep, failed ones included, in the order of their numbers.

    Raises:
        ConfigError: `sweep_dir` is not the folder of a sweep.
    """
    sweep_dir, sweep = Path(sweep_dir), SweepFolder(sweep_dir)
    jobs = [path for path in sweep_dir.iterdir() if _is_job(path)] if sweep_dir.is_dir() else []
    if not jobs and not sweep.has(sweep.PLAN):
        found = "a folder without jobs" if sweep_dir.is_dir() else "no such folder"
        raise ConfigError(
            f"'{sweep_dir}' is not the folder of a sweep: found {found}; expected one folder per job (0, 1, ...) "
            "with summary.json or overrides.txt in it. Give the folder outputs/<name>/multirun/<date>_<time>."
        )
    is_alive = sweep.is_running
    return [_row(path, is_alive=is_alive) for path in sorted(jobs, key=_natural)]


def read_plan(sweep_dir: Path) -> PlanFile:
    """Return what a sweep was asked for, as far as its folder says."""
    try:
        content = SweepFolder(sweep_dir).plan()
    except RunFileError:
        return PlanFile()
    known = {**as_dict(content.pop("search", None)), **content}
    try:
        return TypeAdapter(PlanFile).validate_python({key: value for key, value in known.items() if value is not None})
    except ValidationError:
        return PlanFile()


def _is_job(path: Path) -> bool:
    # No link: it may lead to a run of another place.
    if not path.is_dir() or path.is_symlink() or path.name.startswith("."):
        return False
    # A job that died while it started has nothing but the number that the sweep gave it.
    return RunFolder(path).is_run or RunFolder(path).has(RunFolder.OVERRIDES) or path.name.isdigit()


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _row(path: Path, *, is_alive: bool) -> SweepRow:
    run = RecordedRun(RunFolder(path))
    summary, objective = run.summary, as_dict(run.summary.get("objective"))
    key = shortened(str(objective.get("key") or ""), MAX_NAME)
    metrics = {str(key): number_of(value) for key, value in run.metrics.items()}
    known = {key: value for key, value in metrics.items() if value is not None}
    splits, ticks = as_dict(as_dict(run.config.get("evaluate")).get("splits")), as_dict(summary.get("ticks"))
    others = {f"{split}/{key.partition('/')[2]}" for split in splits} - {key}
    tick = ticks.get(key) if run.best_tick is None else run.best_tick
    sizes = {str(key): number_of(size) for key, size in as_dict(summary.get("num_parameters")).items()}
    duration = number_of(run.provenance.get("duration_s")) if summary else None
    return SweepRow(
        job=path.name,
        parameters=parameters_of(run),
        status=status_of(run, is_alive=is_alive),
        objective=key,
        value=number_of(objective.get("value")),
        metrics=known,
        seconds=number_of(summary.get("training_s")) if duration is None else duration,
        num_ticks=None if (num_ticks := number_of(summary.get("num_ticks"))) is None else int(num_ticks),
        folder=path,
        error=shortened(str(summary.get("error") or ""), MAX_ERROR),
        num_parameters={key: int(size) for key, size in sizes.items() if size is not None},
        other_splits={other: known[other] for other in known if other in others and tick and ticks.get(other) == tick},
    )


def status_of(run: RecordedRun, *, is_alive: bool = False) -> str:
    """Return how a run has ended; running where a process holds its folder, and unfinished where none does.

    Args:
        run: as its folder tells it.
        is_alive: whether it is the job of a sweep that lives, and may have yet to take hold of its folder.
    """
    status = shortened(str(run.summary.get("status") or "unfinished"), MAX_STATUS)
    # An interrupted one may go on.
    return "running" if status not in ENDED and (run.folder.is_locked or (is_alive and not run.summary)) else status


def parameters_of(run: RecordedRun) -> dict[str, str]:
    """Return a run's overrides, without what it takes out; before it has written them, those that it was given."""
    words = run.overrides or run.job.get("words")
    words = [str(word).strip().lstrip("+") for word in words] if isinstance(words, list) else []
    removed = {word[1:] for word in words if word.startswith("~")}
    pairs = (word.partition("=") for word in words if "=" in word and not word.startswith(("~", "hydra.")))
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip() not in removed}


def number_of(value: object) -> float | None:
    """Return a number of a file as a float; None for anything else."""
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


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
        known = tuple(value for text in self.texts if (value := as_number(text)) is not None)
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
    keys = list(dict.fromkeys(key for job in parameters for key in job))[:MAX_KEYS]
    decided = [job for job in parameters if any(key.startswith(DECISION) for key in job)]
    values: dict[str, set[str | None]] = {
        key: {job.get(key) for job in (decided if key.startswith(DECISION) else parameters)} for key in keys
    }
    constants = {}
    for key, different in values.items():
        if not key.startswith(DECISION):
            different.discard(None)
        if len(different) == 1:
            constants[key] = str(*different)
    return [key for key in keys if key not in constants], constants


def labels(keys: Sequence[str]) -> dict[str, str]:
    """Return for each key the shortest end that is its alone, of two parts where it has them; of a decision of one."""

    def label(key: str) -> str:
        parts = key.split(".")
        counts = range(1 if key.startswith(DECISION) else min(2, len(parts)), len(parts))
        ends = (".".join(parts[-count:]) for count in counts)
        return next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key)

    return {key: label(key) for key in keys}


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
        second: the mean of the second objective of the jobs that finished; None unless all of them have it.
    """

    parameters: Mapping[str, str]
    rows: tuple[SweepRow, ...]
    values: tuple[float, ...]
    num_planned: int
    repeated: tuple[str, ...] = ()
    second: float | None = None

    @cached_property
    def mean(self) -> float | None:
        """The mean objective of the jobs that finished."""
        return mean_of(self.values)

    @cached_property
    def standard_error(self) -> float | None:
        """The standard error of the mean; None below two jobs."""
        return standard_error_of(self.values)

    @cached_property
    def other_splits(self) -> dict[str, tuple[float, ...]]:
        """The values of the jobs whose objective counts, by each key of `SweepRow.other_splits` that all have."""
        rows = [row for row in self.rows if counts(row, row.objective)]
        keys = rows[0].other_splits if rows else ()
        values = {key: tuple(row.other_splits.get(key, math.nan) for row in rows) for key in keys}
        return {key: known for key, known in values.items() if not any(map(math.isnan, known))}

    @property
    def is_complete(self) -> bool:
        """Whether all of its jobs have finished with a value."""
        return len(self.values) >= self.num_planned

    @property
    def jobs(self) -> str:
        """The names of its jobs."""
        return ", ".join(row.job for row in self.rows)

    @property
    def status(self) -> str:
        """finished where its value counts, else that of a job which did not finish."""
        return (
            "finished"
            if self.values
            else next((row.status for row in self.rows if row.status != "finished"), "unknown")
        )

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
        columns: the hyperparameters, one value per setting.
        seed_keys: what differs between the jobs of a setting.
        constants: overrides with one value for all jobs.
        settings: in the order of their first jobs.
    """

    name: str
    folder: Path
    rows: tuple[SweepRow, ...]
    plan: PlanFile
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
        known = [setting for setting in self.settings if setting.values]
        return sorted(known, key=lambda setting: (not setting.is_complete, sign * (setting.mean or 0.0)))

    @cached_property
    def best(self) -> Setting | None:
        """The first of `ranked`; None where there is nothing to choose."""
        return self.ranked[0] if self.ranked and len(self.settings) > 1 and self.mode else None

    @cached_property
    def best_jobs(self) -> frozenset[str]:
        """The names of the jobs of the best setting."""
        return frozenset(() if self.best is None else (row.job for row in self.best.rows))

    @property
    def ordered(self) -> list[Setting]:
        """All settings: `ranked`, and then those without a value."""
        return [*self.ranked, *(setting for setting in self.settings if not setting.values)]

    @property
    def only(self) -> Setting | None:
        """The setting of a sweep that has but one, as one over the seed alone."""
        return self.settings[0] if len(self.settings) == 1 else None

    @property
    def direction(self) -> str:
        """Which objective is better, in words."""
        return better(self.mode) or "it is not known whether larger or smaller is better"

    @property
    def has_seeds(self) -> bool:
        """Whether a setting has more than one job."""
        return bool(self.seed_keys) or any(len(setting.rows) > 1 for setting in self.settings)

    @property
    def num_jobs(self) -> int:
        """How many jobs the sweep is to have, as far as is known."""
        return max(len(self.rows), self.plan.num_jobs)

    @cached_property
    def num_ended(self) -> int:
        """How many jobs will not go on."""
        return sum(row.status in ENDED for row in self.rows)

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the values of the settings and of the choice of the best one."""
        plan, best = self.plan, self.best
        repeated = [job for setting in self.settings for job in setting.repeated]
        notes = [f"{plan.ending[:1].upper()}{plan.ending[1:]}."] if plan.ending else []
        if plan.num_same:
            notes.append(f"Draws of settings that a job has already, whose result is reused: {plan.num_same}.")
        if repeated:
            jobs = ", ".join(sorted(repeated, key=lambda job: (len(job), job))[:MAX_NAMED])
            more = ", ..." if len(repeated) > MAX_NAMED else ""
            notes.append(f"Not counted, as another job has the same setting and the same seed: {jobs}{more}.")
        if best is None:
            return notes
        sign = 1 if self.mode == "min" else -1
        leader = min(self.ranked, key=lambda setting: sign * (setting.mean or 0.0))
        if leader.mean != best.mean:
            notes.append(
                f"A setting with {seeds(leader)} has a better mean, {number(leader.mean)}, but not all of its jobs "
                f"have finished: {self.describe(leader)}."
            )
        if not best.is_complete:
            notes.append(f"No setting has all of its jobs yet; the best one has {seeds(best)}.")
        if equal := sum(setting.mean == best.mean for setting in self.ranked) - 1:
            notes.append(f"{equal} other setting{'s have' if equal > 1 else ' has'} exactly the same value.")
        others = {row.objective for row in self.rows} - {"", self.objective}
        if others:
            notes.append(f"Jobs with another objective are not compared: {', '.join(sorted(others))}.")
        return notes

    @cached_property
    def population(self) -> Population | None:
        """The members of a population, whose settings have changed; None where each job has kept its own."""
        return Population.read(SweepFolder(self.folder))

    def trained_by(self, setting: Setting) -> list[tuple[int, Settings]]:
        """Return by what the best state of a population's member was trained, each with the tick after which it began.

        Nothing where jobs have kept their settings.
        """
        return _trained_by(RecordedRun(RunFolder(setting.rows[0].folder)), self.population)

    def describe(self, setting: Setting) -> str:
        """Return a setting as the words of a command line."""
        return " ".join(self.overrides(setting))

    def overrides(self, setting: Setting) -> list[str]:
        """Return the words that make a setting; decisions that were drawn alike in all jobs are among them."""
        if trained_by := self.trained_by(setting):
            return _as_words(trained_by)
        alike = {key: value for key, value in self.constants.items() if key.startswith(DECISION)}
        return [override(key, value) for key, value in {**setting.parameters, **alike}.items()]


# Words of a job's command line that say where it ran, or what ran it.
_OF_SWEEP = ("hydra.", "sweep.", "sweep=", "resume=")


def repeat_command(comparison: Comparison) -> str:
    """Return one line that trains the best setting again, with its recipe, packages and seeds; empty without a best.

    Args:
        comparison: of a sweep, whose folder may be a stranger's: the line is to be read before it is run.
    """
    setting = comparison.best or comparison.only
    if setting is None or setting.mean is None:
        return ""
    begin, words = _job_words(RecordedRun(RunFolder(setting.rows[0].folder)))
    words = _changed(words, comparison.trained_by(setting))
    seeds = [(key, [row.parameters[key] for row in setting.rows]) for key in comparison.seed_keys]
    if len(setting.rows) == 1 or len(seeds) != 1:
        return shlex.join(["mlotool", "run", *begin, *words])
    [(key, values)] = seeds
    words = [word for word in words if word.lstrip("+").partition("=")[0] != key]
    return shlex.join(["mlotool", "run", "-m", *begin, *words, f"{key}={','.join(values)}"])


def job_command(run: RecordedRun) -> str:
    """Return one line that trains a job of a sweep again, on its own."""
    begin, words = _job_words(run)
    return shlex.join(["mlotool", "run", *begin, *_changed(words, trained_by(run))])


def trained_by(run: RecordedRun) -> list[tuple[int, Settings]]:
    """Return by what a run's best state was trained, each with the tick after which it began.

    Nothing for a run that is no member of a population.
    """
    return _trained_by(run, Population.read(SweepFolder(run.folder.path.parent)))


def _trained_by(run: RecordedRun, population: Population | None) -> list[tuple[int, Settings]]:
    job = run.folder.path.name
    if population is None or not job.isdigit() or int(job) >= len(population.settings):
        return []
    return population.schedule(int(job), math.inf if run.best_tick is None else run.best_tick)


def _changed(words: Sequence[str], trained_by: Sequence[tuple[int, Settings]]) -> list[str]:
    """Return a job's overrides with the settings of a population's member in the place of those that it began with."""
    own = trained_by[0][1] if trained_by else {}
    return [*(word for word in words if word.lstrip("+").partition("=")[0] not in own), *_as_words(trained_by)]


def _job_words(run: RecordedRun) -> tuple[list[str], list[str]]:
    """Return of a job's command the packages and the recipe, by path or name, and the overrides."""
    recipe, words = "", list[str]()
    # In its folder a line has ends and other signs as escapes.
    for word in (str(word).strip() for word in run.overrides or run.job.get("words") or ()):
        key, _, value = word.lstrip("+").partition("=")
        if key == "recipe":
            recipe = value
        elif key.startswith(DECISION):
            words.append(override(key, value))
        elif not word.lstrip("+~").startswith(_OF_SWEEP):
            words.append(word)
    path, trusted = _sources(str(run.provenance.get("command") or run.job.get("command") or ""))
    return [*trusted, *filter(None, [path or recipe])], words


def _as_words(trained_by: Sequence[tuple[int, Settings]]) -> list[str]:
    """Return settings that change as words of a command line.

    Example:
        >>> _as_words([(0, {"problems.net.optimizer.lr": 0.1}), (50, {"problems.net.optimizer.lr": 0.2})])
        ['problems.net.optimizer.lr=0.1', 'runner.changes={50: {problems.net.optimizer.lr: 0.2}}']
    """
    if not trained_by:
        return []
    (_, first), *later = trained_by
    texts = [f"{tick}: {{{', '.join(f'{key}: {value!r}' for key, value in now.items())}}}" for tick, now in later]
    return [
        *(f"{key}={value!r}" for key, value in first.items()),
        *([f"runner.changes={{{', '.join(texts)}}}"] if texts else []),
    ]


def _sources(command: str) -> tuple[str, list[str]]:
    """Return the path of a command line's recipe, empty where it is named, and its words about packages of the user's.

    Example:
        >>> _sources("mlotool run -m mine.yaml --trust rings seed=0,1")
        ('mine.yaml', ['--trust', 'rings'])
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return "", []
    path = next((word for word in words if "=" not in word and word.endswith((".yaml", ".yml"))), "")
    trusted = [word for pair in pairwise(words) if pair[0] == "--trust" for word in pair]
    return path, trusted + [word for word in words if word.startswith("--trust=")]


def trusted_packages(run: RecordedRun) -> list[str]:
    """Return the packages of the user's that a run's command names by `--trust`."""
    _, words = _sources(str(run.provenance.get("command") or ""))
    return [word.removeprefix("--trust=") for word in words if word != "--trust"]


def override(key: str, value: str) -> str:
    """Return a key and its value as a word of a command line; a decision is a key that no recipe has by itself."""
    return f"{'+' if key.startswith(DECISION) else ''}{key}={value}"


def better(mode: str) -> str:
    """Return which values are better, in words; empty where that is not known."""
    return {"min": "smaller is better", "max": "larger is better"}.get(mode, "")


def is_seed(key: str) -> bool:
    """Say whether a key is that of a seed: `seed`, or one that ends in `.seed`, such as `data.seed`."""
    return key == "seed" or key.endswith(".seed")


def seeds(setting: Setting) -> str:
    """Return how many of a setting's jobs have finished: `3 seeds`, or `2 of 3 seeds`."""
    done, planned = len(setting.values), setting.num_planned
    if done == planned:
        return f"{done} seed{'s' if done != 1 else ''}"
    return f"{done} of {planned} seed{'s' if planned != 1 else ''}"


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean; None of nothing."""
    return float(np.mean(values)) if values else None


def standard_error_of(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None below two values."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def mean_text(values: Sequence[float]) -> str:
    """Return a mean with its standard error, to the digits that the error leaves.

    Example:
        >>> mean_text((0.91, 0.93, 0.92))
        '0.92 ± 0.0058'
    """
    mean, error = mean_of(values), standard_error_of(values)
    return number(mean) if error is None else f"{number(mean)} ± {error:.2g}"


def compare(sweep_dir: Path) -> Comparison:
    """Read a sweep's folder and group its jobs by all that differs but the seed.

    Raises:
        ConfigError: `sweep_dir` is not the folder of a sweep.
    """
    sweep_dir = Path(sweep_dir)
    rows, plan = tuple(sweep_rows(sweep_dir)), read_plan(sweep_dir)
    differing, constants = split_keys([row.parameters for row in rows])
    seed_keys = tuple(key for key in differing if is_seed(key))
    keys = [key for key in differing if not is_seed(key)]
    objective, mode = _objective(rows, plan)
    planned = max(plan.repeats, math.prod(swept.num_values or 1 for key, swept in plan.keys.items() if is_seed(key)))
    settings = _settings(rows, keys, objective, planned, plan.second_objective)
    columns = tuple(
        Column(key, label, tuple(setting.parameters.get(key) for setting in settings),
               key in plan.keys and plan.keys[key].is_log)
        for key, label in labels(keys).items()
    )  # fmt: skip
    # outputs/<name>/multirun/<date>_<time>
    path = sweep_dir.resolve()
    name = path.parent.parent.name if path.parent.name == "multirun" else path.name
    return Comparison(name, sweep_dir, rows, plan, objective, mode, columns, seed_keys, constants, settings)


def _objective(rows: Sequence[SweepRow], plan: PlanFile) -> tuple[str, str]:
    """Return the key that is compared, and its direction: as the jobs say, else as the sweep was asked for."""
    said = [row for row in rows if row.objective]
    same = [row for row in said if row.objective == plan.objective]
    for row in (same or said or rows)[:1]:
        objective = RecordedRun(RunFolder(row.folder)).objective
        key = str(objective["key"] or plan.objective or "objective")
        return key, str(objective["mode"] or (plan.mode if key == plan.objective else ""))
    return plan.objective or "objective", plan.mode


def counts(row: SweepRow, objective: str) -> bool:
    """Say whether a job's value is one that settings are compared by."""
    is_comparable = row.status == "finished" and row.objective == objective
    return is_comparable and row.value is not None and abs(row.value) < LARGEST


def _settings(
    rows: Sequence[SweepRow], keys: Sequence[str], objective: str, planned: int, second_objective: str
) -> tuple[Setting, ...]:
    groups: dict[tuple[str | None, ...], list[SweepRow]] = {}
    for row in rows:
        # Of a job that does not say what it is, nothing can be told.
        if row.parameters:
            groups.setdefault(tuple(row.parameters.get(key) for key in keys), []).append(row)
    settings = []
    for group in groups.values():
        # A study may draw a setting with the same seed again: that is the same run, and no further sample.
        by_seed = {
            tuple(sorted(pair for pair in row.parameters.items() if is_seed(pair[0]))): row
            for row in sorted(group, key=lambda row: counts(row, objective))
        }
        kept = {row.job for row in by_seed.values()}
        jobs = tuple(row for row in group if row.job in kept)
        seconds = [row.number(second_objective) for row in jobs if row.status == "finished"]
        known = [value for value in seconds if value is not None and abs(value) < LARGEST]
        settings.append(
            Setting(
                parameters={key: group[0].parameters[key] for key in keys if key in group[0].parameters},
                rows=jobs,
                values=tuple(row.value for row in jobs if counts(row, objective) and row.value is not None),
                num_planned=max(planned, len(jobs)),
                repeated=tuple(row.job for row in group if row.job not in kept),
                second=float(np.mean(known)) if known and len(known) == len(seconds) else None,
            )
        )
    return tuple(settings)


MAX_STACKS, MAX_LINES = 20_000, 12
MAX_REASON, MAX_PARTS = 300, 12
# Of one tick: what is beside them is no measurement.
Seconds = Annotated[float, Field(gt=1e-9, lt=1e5, strict=True)]
Job = Annotated[int, Field(ge=0, lt=10**9, strict=True)]


@validated.dataclass(frozen=True)
class StackNote:
    """Jobs that were tried as one program.

    Args:
        jobs: their numbers, in order.
        is_fused: whether they ran as one.
        fused_s: seconds of one tick of all as one program; None where it was not measured.
        alone_s: the same, one by one.
        reason: why they, or parts of their ticks, ran one by one; empty where they did not.
        until_tick: how many ticks those ran as one that went on one by one; None where they did not.
    """

    jobs: Annotated[tuple[Job, ...], Field(min_length=1), AfterValidator(lambda jobs: tuple(sorted(set(jobs))))]
    is_fused: bool
    fused_s: Seconds | None = None
    alone_s: Seconds | None = None
    reason: Annotated[str, AfterValidator(lambda text: shortened(" ".join(text.split()), MAX_REASON))] = ""
    until_tick: Annotated[int, Field(gt=0, lt=10**12, strict=True)] | None = None


def fusion_lines(sweep_dir: Path) -> list[str]:
    """Return a sentence for each stack of jobs, or for all that ran one by one for the same reason.

    Args:
        sweep_dir: the folder of a sweep; it may be a stranger's.

    Returns:
        At most MAX_LINES, and then how many are left out; none where no job shared a process.
    """
    alike: dict[StackNote, set[int]] = {}
    for note in _stack_notes(sweep_dir):
        is_plain = not note.is_fused and note.fused_s is None
        alike.setdefault(replace(note, jobs=(0,)) if is_plain else note, set()).update(note.jobs)
    lines = [f"{_jobs_in_words(sorted(jobs))} {_verdict(note)}" for note, jobs in alike.items()]
    left = len(lines) - MAX_LINES
    more = [f"{left} more such lines are left out: see {SweepFolder.TOGETHER}/*.json."] if left > 0 else []
    return [*lines[:MAX_LINES], *more]


def warning_lines(sweep_dir: Path) -> list[str]:
    """Return a sentence that says where warnings of jobs stand that shared a process; none where there are none.

    Args:
        sweep_dir: the folder of a sweep; it may be a stranger's.
    """
    places = []
    for name in _fusion_files(sweep_dir, ".log"):
        with suppress(RunFileError):
            places += [name] if "mlotool: warning: " in (read_text(sweep_dir, name) or "") else []
    return [f"warnings of runs: {_some(places)}"] if places else []


def _fusion_files(sweep_dir: Path, suffix: str) -> list[str]:
    try:
        return SweepFolder(sweep_dir).together_names(suffix)
    except RunFileError:
        return []


def _stack_notes(sweep_dir: Path) -> list[StackNote]:
    notes: list[StackNote] = []
    for name in _fusion_files(sweep_dir, ".json"):
        with suppress(RunFileError, ValidationError):
            stacks = (SweepFolder(sweep_dir).json(name) or {}).get("stacks")
            notes += TypeAdapter(list[StackNote]).validate_python(stacks)
    return sorted(notes[:MAX_STACKS], key=lambda note: note.jobs)


def _verdict(note: StackNote) -> str:
    """Return how jobs ran, what that gained, and why not better."""
    how = "ran as one program" if note.is_fused else "ran one by one"
    if note.until_tick is not None:
        how = f"ran as one program until tick {note.until_tick}, and then one by one{' in parts' * note.is_fused}"
    if note.fused_s is not None and note.alone_s is not None:
        fused, alone = (f"{1e3 * seconds:.3g} ms" for seconds in (note.fused_s, note.alone_s))
        times = note.alone_s / note.fused_s
        how += f" ({fused} for the gradients of a tick as one, {alone} one by one: {times:.1f} times as fast)"
    reason = f"in parts one by one: {note.reason}" if note.is_fused else note.reason
    return f"{how}; {reason}" if note.reason else how


def _jobs_in_words(jobs: Sequence[int]) -> str:
    """Return jobs in words.

    Example:
        >>> _jobs_in_words((0, 1, 2, 5, 6))
        'jobs 0 to 2, 5, 6'
    """
    parts: list[str] = []
    # Consecutive numbers are as far from their places as the first one is.
    for _, pairs in groupby(enumerate(jobs), key=lambda pair: pair[1] - pair[0]):
        run = [job for _, job in pairs]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return f"job{'s' if len(jobs) > 1 else ''} {_some(parts)}"


def _some(parts: list[str]) -> str:
    rest = f" and {len(parts) - MAX_PARTS} more" if len(parts) > MAX_PARTS else ""
    return ", ".join(parts[:MAX_PARTS]) + rest
