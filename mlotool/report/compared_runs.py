"""Some runs side by side: settings that differ, metrics with their ticks, and a page with the curves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import numpy as np

from mlotool.config.schema import defaults_at
from mlotool.core.errors import ConfigError
from mlotool.folders.documents import ends
from mlotool.folders.run_folder import RunFolder
from mlotool.folders.safe_files import write_text
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.report.figure import NUM_PROBLEM_COLOURS, Card, Sketchbook, report_style
from mlotool.report.formats import NONE, duration, number, shortened
from mlotool.report.page import page
from mlotool.report.recorded_run import SPLIT_NAMES, RecordedRun, Series, read_series
from mlotool.report.run_figures import SPLIT_STYLES, Line, curve_card
from mlotool.report.sweep import status_of, trained_by

PAGE = "compare.html"
MAX_RUNS, MAX_SETTINGS, MAX_METRICS, MAX_FIGURES, MAX_TEXT, MAX_LABEL = 26, 300, 300, 40, 60, 26
# What is no setting of a run's result: the run that it went on from.
_LEFT_OUT = ("resume",)
# What was logged of a problem, and is no metric.
_COUNTS = ("step", "lr")


@dataclass(frozen=True)
class Taken:
    """A metric of a run.

    Args:
        value: None where it was not finite.
        tick: at which it was taken.
    """

    value: float | None
    tick: float

    @property
    def text(self) -> str:
        """The value and its tick."""
        return f"{number(self.value)} at {number(self.tick)}"


class ComparedRun:
    """One of the runs.

    Args:
        letter: its name in the comparison.
        folder: of the run.

    Raises:
        ConfigError: it is no run's folder.
    """

    def __init__(self, letter: str, folder: Path) -> None:
        self.letter, self.folder = letter, folder
        if SweepFolder(folder).is_sweep and not RunFolder(folder).is_run:
            raise ConfigError(
                f"compare: found '{folder}', the folder of a sweep; expected runs, or jobs of it. Write {folder}/0 "
                f"{folder}/1, or look at all of its jobs: mlotool report {folder}."
            )
        RunFolder(folder).check()
        self.run = RecordedRun(RunFolder(folder))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The values of config.yaml by dotted key; those of a population's member with the ticks of their changes."""
        values = {key: value for key, value in ends(self.run.config) if key not in _LEFT_OUT}
        for tick, changed in trained_by(self.run):
            values |= {key: f"{values[key]}, from tick {tick}: {x}" if tick else x for key, x in changed.items()}
        return values

    @cached_property
    def series(self) -> dict[str, Series]:
        """What metrics.csv holds, by key."""
        series, notes = read_series(self.run.folder)
        self.run.notes += notes
        return {one.key: one for one in series}

    @cached_property
    def last(self) -> dict[str, Taken]:
        """The last value of each key."""
        return {key: _taken(one.values[-1], one.ticks[-1]) for key, one in self.series.items() if len(one.ticks)}

    @cached_property
    def best(self) -> dict[str, Taken]:
        """The values of the best checkpoint; empty where none was kept."""
        tick = self.run.best_tick
        if tick is None:
            return {}
        # `end` splits and analyses are evaluated with it, after training, and logged at its tick.
        at_end = {key: taken for key, taken in self.last.items() if taken.tick == tick}
        known = {str(key): Taken(_finite(value), tick) for key, value in self.run.best_metrics.items()}
        return {**known, **at_end}

    @property
    def objective(self) -> Taken | None:
        """The objective, at the best checkpoint where there is one."""
        key, value = str(self.run.objective.get("key")), _finite(self.run.objective.get("value"))
        known = self.best.get(key) or self.last.get(key)
        return known if value is None or known is None else Taken(value, known.tick)

    @property
    def facts(self) -> dict[str, str]:
        """What it is, and how it ended."""
        objective = self.objective
        value = NONE if objective is None else f"{self.run.objective.get('key')} {objective.text}"
        started = str(self.run.provenance.get("started") or NONE)[:16].replace("T", " ")
        return {
            "name": self.run.name,
            "status": status_of(self.run),
            "objective, at tick": value,
            "ticks": number(self.run.summary.get("num_ticks")),
            "training": duration(self.run.summary.get("training_s")),
            "started": started,
        }


class RunComparison:
    """Runs side by side.

    Args:
        folders: of at least two different runs, or jobs of a sweep.

    Raises:
        ConfigError: one is no run's folder, or there are too few, too many, or one twice.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        if not 2 <= len(folders) <= MAX_RUNS:
            raise ConfigError(f"compare: found {len(folders)} run(s); expected 2 to {MAX_RUNS}. Name others.")
        places = [folder.resolve() for folder in folders]
        if twice := [folder for folder, place in zip(folders, places, strict=True) if places.count(place) > 1]:
            raise ConfigError(f"compare: found '{twice[0]}' twice; expected different runs. Name each once.")
        self.runs = [ComparedRun(letter, folder) for letter, folder in zip(ascii_uppercase, folders, strict=False)]

    @cached_property
    def settings(self) -> dict[str, list[Any]]:
        """By dotted key, the values of all runs, of settings that are not the same in all."""
        keys = list(dict.fromkeys(key for run in self.runs for key in run.settings))
        table = {key: [run.settings.get(key, _default(key)) for run in self.runs] for key in keys}
        return {key: values for key, values in table.items() if any(_differ(values[0], value) for value in values)}

    @property
    def labels(self) -> list[str]:
        """The letters of the runs, each with its value where one setting alone differs."""
        letters = [run.letter for run in self.runs]
        if len(self.settings) != 1:
            return letters
        [(key, values)] = self.settings.items()
        name = key.rpartition(".")[2]
        return [f"{letter}: {name}={value_text(value)}" for letter, value in zip(letters, values, strict=True)]

    def metrics(self, which: str) -> dict[str, list[Taken | None]]:
        """Return the metrics of all runs by key: what was evaluated first, then what was logged in training.

        Args:
            which: "best", those of the best checkpoint, or "last", those that are not of all runs' best checkpoints.
        """
        found: list[Mapping[str, Taken]] = [getattr(run, which) for run in self.runs]
        keys = [key for key in dict.fromkeys(key for one in found for key in one) if _is_metric(key)]
        if which == "last":
            keys = [key for key in keys if any(run.last.get(key) != run.best.get(key) for run in self.runs)]
        keys.sort(key=lambda key: not self.is_evaluated(key))
        return {key: [one.get(key) for one in found] for key in keys[:MAX_METRICS]}

    def is_evaluated(self, key: str) -> bool:
        """Say whether a key is the objective, or of a split or an analysis."""
        owner = key.partition("/")[0]
        is_trained = any(owner in run.run.problems for run in self.runs)
        objectives = {run.run.objective.get("key") for run in self.runs}
        return key in objectives or not is_trained or owner in SPLIT_NAMES

    @property
    def curves(self) -> dict[str, list[tuple[int, Series]]]:
        """By key, the curves of the runs that have one, each with the run's place; of keys that two runs have.

        Learning rates that stay what they are have none: a setting says them.
        """
        keys = dict.fromkeys(key for run in self.runs for key in run.series if key.rpartition("/")[2] != "step")
        curves = {}
        for key in sorted(keys, key=lambda key: (not self.is_evaluated(key), key.endswith("/lr"))):
            group = [(place, run.series[key]) for place, run in enumerate(self.runs) if key in run.series]
            is_constant = key.endswith("/lr") and all(np.ptp(series.values) == 0 for _, series in group)
            if len(group) > 1 and not is_constant and any(len(series.ticks) > 1 for _, series in group):
                curves[key] = group
        return curves


def _default(key: str) -> Any:
    """Return what stands for a key that a config lacks: the schema's default, as an older version wrote fewer keys."""
    parent, _, name = key.rpartition(".")
    return defaults_at(parent).get(name)


def _differ(first: Any, second: Any) -> bool:
    return bool(first != second) or type(first) is not type(second)


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value == value and abs(value) != float("inf") else None


def _taken(value: Any, tick: Any) -> Taken:
    return Taken(_finite(float(value)), float(tick))


def _is_metric(key: str) -> bool:
    return key.rpartition("/")[2] not in _COUNTS


def value_text(value: Any) -> str:
    """Return the value of a setting as a recipe has it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def write_comparison(comparison: RunComparison, file: Path) -> Path:
    """Write the page of a comparison, and return it.

    Args:
        comparison: of some runs.
        file: the page; its folder is made where it is missing.

    Raises:
        WriteError: the disk does not take it.
    """
    # The figures stand in the page; nobody wants their files beside a page of the working folder.
    with TemporaryDirectory() as folder, report_style():
        cards, num_left = _cards(Sketchbook(Path(folder) / "report"), comparison)
    home = file.absolute().parent
    rows = [(run, _colour(place), run.facts, _link(run.folder, home)) for place, run in enumerate(comparison.runs)]
    text = page(
        "compare.html", "Comparison", runs=rows, heads=list(comparison.runs[0].facts), comparison=comparison,
        letters=[(run.letter, _colour(place)) for place, run in enumerate(comparison.runs)],
        settings=list(comparison.settings.items())[:MAX_SETTINGS], num_settings=len(comparison.settings),
        value_text=_shortened(value_text), max_text=MAX_TEXT, cards=cards, num_left=num_left,
        tables={"Metrics of the best checkpoints": comparison.metrics("best"),
                "Last metrics": comparison.metrics("last")},
    )  # fmt: skip
    return write_text(home, file.name, text)


def _cards(book: Sketchbook, comparison: RunComparison) -> tuple[list[Card], int]:
    """Return a figure for each key that runs share, and how many had no room."""
    labels, curves = [shortened(label, MAX_LABEL) for label in comparison.labels], comparison.curves
    cards = []
    for key, group in list(curves.items())[:MAX_FIGURES]:
        lines = [Line(_colour(place), labels[place], *_style(place)) for place, _ in group]
        cards.append(curve_card(book, key, key, [series for _, series in group], lines))
    return cards, len(curves) - len(cards)


def _colour(place: int) -> str:
    return f"problem-{place % NUM_PROBLEM_COLOURS}"


def _style(place: int) -> tuple[str, str]:
    """Return line and marker: the first four runs differ in them too, for who cannot tell colours."""
    return SPLIT_STYLES[place % len(SPLIT_STYLES)]


def _shortened(text: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: shortened(text(value), MAX_TEXT)


def _link(folder: Path, home: Path) -> str:
    """Return a link to the page of a run that lies below the folder of the comparison; empty where there is none."""
    report = folder.absolute() / RunFolder.PAGE
    if not report.is_file() or not report.is_relative_to(home):
        return ""
    return f"./{quote(report.relative_to(home).as_posix())}"


def metric_texts(values: Sequence[Taken | None]) -> list[str]:
    """Return a row of metrics, each with its tick."""
    return [NONE if taken is None else taken.text for taken in values]
