"""The settings of a sweep: jobs that differ in nothing but their seed are samples of one setting."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mlotool.report.run_folder import is_run_folder, read_run_folder
from mlotool.report.series import LARGEST
from mlotool.report.sweep import ENDED, SweepPlan, SweepRow, read_plan, sweep_rows
from mlotool.report.sweep_columns import DECISION, Column, labels, split_keys

MAX_NAMED = 5
"""Jobs that a note names."""


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
        best, ranked = self.best, self.ranked
        repeated = {job for each in self.settings for job in each.repeated}
        notes = [_ending_note(self.plan)] if self.plan.ending else []
        if self.plan.num_same:
            notes.append(_same_note(self.plan))
        if repeated:
            notes.append(_repetition_note([row.job for row in self.rows if row.job in repeated]))
        if best is None:
            return notes
        sign = 1 if self.mode == "min" else -1
        leader = min(ranked, key=lambda each: sign * (each.mean or 0.0))
        if leader.mean != best.mean:
            notes.append(
                f"A setting with {seeds(leader)} has a better mean, {leader.mean:.4g}, but not all of its jobs have "
                f"finished: {self.describe(leader)}."
            )
        if not best.is_complete:
            notes.append(f"No setting has all of its jobs yet; the best one has {seeds(best)}.")
        equal = sum(each.mean == best.mean for each in ranked) - 1
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
    shortest = labels(own)
    columns = (
        Column(key, shortest[key], tuple(each.parameters.get(key) for each in settings), key in plan.log_keys)
        for key in own
    )
    return Comparison(
        _name(sweep_dir), sweep_dir, rows, plan, objective, mode, tuple(columns), seed_keys, constants, settings
    )


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
    return (
        row.status == "finished" and row.objective == objective and row.value is not None and abs(row.value) < LARGEST
    )


def _settings(rows: Sequence[SweepRow], keys: Sequence[str], objective: str, planned: int) -> tuple[Setting, ...]:
    groups: dict[tuple[str | None, ...], list[SweepRow]] = {}
    for row in rows:
        # Of a job that does not say what it is, nothing can be told.
        if row.parameters:
            groups.setdefault(tuple(row.parameters.get(key) for key in keys), []).append(row)
    return tuple(
        _setting(
            {key: text for key, text in zip(keys, texts, strict=True) if text is not None}, group, objective, planned
        )
        for texts, group in groups.items()
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


def _ending_note(plan: SweepPlan) -> str:
    return f"{plan.ending[:1].upper()}{plan.ending[1:]}."


def _same_note(plan: SweepPlan) -> str:
    if plan.num_same == 1:
        return "1 more draw was of a point that a job has: it has the result of that job, and was not trained."
    return (
        f"{plan.num_same} more draws were of points that jobs have: they have the results of those jobs, and were not "
        "trained."
    )


def _repetition_note(jobs: Sequence[str]) -> str:
    names = ", ".join(jobs[:MAX_NAMED]) + (", ..." if len(jobs) > MAX_NAMED else "")
    if len(jobs) == 1:
        return f"Job {names} has the same setting and the same seed as another job and is not counted."
    return f"{len(jobs)} jobs have the same setting and the same seed as another job and are not counted: {names}."


def _name(sweep_dir: Path) -> str:
    # outputs/<name>/multirun/<date>_<time>
    path = sweep_dir.resolve()
    return path.parent.parent.name if path.parent.name == "multirun" else path.name
