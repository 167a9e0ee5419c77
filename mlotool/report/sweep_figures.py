"""The figures of a sweep: hyperparameters against the objective, their importances, the objective over the jobs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from mlotool.report.figure import WIDE_INCHES, Card, Sketchbook, legend_above
from mlotool.report.formats import NONE, number, shortened
from mlotool.report.importance import importances
from mlotool.report.palette import light
from mlotool.report.sweep_columns import Column

MAX_AXES = 12
MAX_TICKS = 6


@dataclass(frozen=True)
class Jobs:
    """The jobs of a sweep that have a value.

    Args:
        names: their folders.
        values: of the objective.
        is_finished: false for one that was pruned or interrupted.
        columns: their hyperparameters.
        objective: the key.
        mode: "min" or "max".
    """

    names: tuple[str, ...]
    values: tuple[float, ...]
    is_finished: tuple[bool, ...]
    columns: tuple[Column, ...]
    objective: str
    mode: str

    @property
    def best(self) -> int | None:
        """The index of the best job, out of those that finished."""
        finished = [index for index, done in enumerate(self.is_finished) if done]
        sign = 1 if self.mode == "min" else -1
        return min(finished, key=lambda index: sign * self.values[index], default=None)


def sweep_cards(book: Sketchbook, jobs: Jobs) -> tuple[list[Card], list[Card]]:
    """Draw what the jobs allow: the wide figures, and those that stand side by side."""
    if len(jobs.values) < 2:
        return [], []
    wide = [_parallel_card(book, jobs)] if jobs.columns else []
    return wide, [_history_card(book, jobs), *_importance_cards(book, jobs)]


def _parallel_card(book: Sketchbook, jobs: Jobs) -> Card:
    columns = jobs.columns[: MAX_AXES - 1]
    figure, axes = book.new(WIDE_INCHES)
    scales = [*(_Scale.of(column) for column in columns), _Scale.of_objective(jobs)]
    heights = np.stack([scale.heights for scale in scales], axis=1)
    places = np.arange(len(scales))
    # The better a job, the stronger its line.
    order = np.argsort(np.argsort(jobs.values))
    shade = order / max(1, len(order) - 1)
    for index in np.argsort(shade if jobs.mode == "max" else -shade):
        goodness = float(shade[index] if jobs.mode == "max" else 1 - shade[index])
        is_best = index == jobs.best
        axes.plot(
            places,
            heights[index],
            color=light("problem-1" if is_best else "problem-0"),
            alpha=1.0 if is_best else 0.12 + 0.68 * goodness,
            linewidth=2.2 if is_best else 1.1,
            linestyle="-" if jobs.is_finished[index] else (0, (2, 2)),
            zorder=3 if is_best else 2,
        )
    _draw_scales(axes, scales)
    handles = [Line2D([], [], color=light("problem-1"), linewidth=2.2), Line2D([], [], color=light("problem-0"))]
    labels = [f"best: job {jobs.names[jobs.best]}" if jobs.best is not None else "best", "others, better ones stronger"]
    if not all(jobs.is_finished):
        handles.append(Line2D([], [], color=light("problem-0"), linestyle=(0, (2, 2))))
        labels.append("not finished")
    axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1.1), ncols=3)
    left = f"{len(jobs.columns) - len(columns)} more keys are not drawn." if len(columns) < len(jobs.columns) else ""
    return book.finish(figure, "parallel", "Hyperparameters and objective", left)


@dataclass(frozen=True)
class _Scale:
    """A vertical axis between 0 and 1."""

    label: str
    heights: NDArray[np.float64]
    ticks: list[tuple[float, str]]

    @classmethod
    def of(cls, column: Column) -> "_Scale":
        if column.numbers is None:
            names = list(dict.fromkeys(str(text or NONE) for text in column.texts))
            places = {name: (index + 0.5) / len(names) for index, name in enumerate(names)}
            heights = np.array([places[str(text or NONE)] for text in column.texts])
            return cls(column.label, heights, [(place, shortened(name, 18)) for name, place in places.items()])
        return cls.of_numbers(column.label, np.asarray(column.numbers), is_log=column.is_log)

    @classmethod
    def of_objective(cls, jobs: Jobs) -> "_Scale":
        return cls.of_numbers(jobs.objective, np.asarray(jobs.values), is_log=False)

    @classmethod
    def of_numbers(cls, label: str, values: NDArray[np.float64], *, is_log: bool) -> "_Scale":
        low, high = float(values.min()), float(values.max())
        if low == high:
            return cls(label, np.full(len(values), 0.5), [(0.5, number(low))])
        seen = sorted(set(values.tolist()))
        place = np.log if is_log else np.asarray
        span = float(place(high) - place(low))
        if len(seen) > MAX_TICKS:
            seen = [
                float(np.exp(each)) if is_log else float(each)
                for each in np.linspace(float(place(low)), float(place(high)), 5)
            ]
        ticks = [(float(place(each) - place(low)) / span, f"{each:.3g}") for each in seen]
        return cls(label, np.asarray((place(values) - place(low)) / span), ticks)


def _draw_scales(axes: Axes, scales: Sequence[_Scale]) -> None:
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_yticks([])
    axes.set_ylim(-0.04, 1.04)
    axes.set_xlim(-0.25, len(scales) - 0.55)
    axes.set_xticks(range(len(scales)), [shortened(scale.label, 26) for scale in scales])
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", length=0, labelsize=8, labelcolor=light("ink"))
    box = {"boxstyle": "round,pad=0.15", "facecolor": light("card"), "edgecolor": "none", "alpha": 0.85}
    for place, scale in enumerate(scales):
        axes.plot([place, place], [0, 1], color=light("muted"), linewidth=0.8, zorder=4)
        for height, text in scale.ticks:
            axes.plot([place - 0.012, place + 0.012], [height, height], color=light("muted"), linewidth=0.8, zorder=4)
            axes.text(place + 0.025, height, text, va="center", color=light("ink"), fontsize=7, bbox=box, zorder=5)


def _history_card(book: Sketchbook, jobs: Jobs) -> Card:
    figure, axes = book.new()
    places = np.arange(len(jobs.values))
    values, done = np.asarray(jobs.values), np.asarray(jobs.is_finished)
    handles, labels = [], []
    if done.any():
        handles += axes.plot(places[done], values[done], "o", color=light("problem-0"), markersize=4)
        labels.append("finished")
        best = np.minimum if jobs.mode == "min" else np.maximum
        handles += axes.step(places[done], best.accumulate(values[done]), where="post", color=light("problem-1"))
        labels.append("best so far")
    if not done.all():
        style = {"markerfacecolor": "none", "markersize": 4, "linestyle": "none"}
        handles += axes.plot(places[~done], values[~done], marker="o", color=light("muted"), **style)  # type: ignore[arg-type]
        labels.append("not finished")
    # Jobs are named by whole numbers, unless their folders were renamed.
    shown = places[:: max(1, -(-len(places) // 8))]
    axes.set_xticks(shown, [jobs.names[index] for index in shown])
    axes.set_xlabel("job")
    axes.set_ylabel(shortened(jobs.objective, 40))
    legend_above(axes, handles, labels)
    return book.finish(figure, "objective", "Objective over the jobs")


def _importance_cards(book: Sketchbook, jobs: Jobs) -> list[Card]:
    finished = [index for index, done in enumerate(jobs.is_finished) if done]
    columns = [column.take(finished) for column in jobs.columns]
    method, found = importances(columns, [jobs.values[index] for index in finished])
    if not found:
        return []
    figure, axes = book.new()
    shown = found[:10][::-1]
    axes.barh(range(len(shown)), [value for _, value in shown], color=light("problem-0"), height=0.6)
    axes.set_yticks(range(len(shown)), [shortened(label, 26) for label, _ in shown])
    axes.set_xlim(0, max(1.0, max(value for _, value in shown) * 1.12))
    axes.grid(visible=False, axis="y")
    for place, (_, value) in enumerate(shown):
        axes.text(value + 0.015, place, f"{value:.2f}", va="center", fontsize=7.5)
    note = f"{method[0].upper()}{method[1:]}, over the {len(finished)} jobs that finished."
    return [book.finish(figure, "importance", "Importance of the hyperparameters", note)]
