"""A picture of what jobs had with inherited weights and what they have in the end."""

import math

from mlotool.report.figure import Card, Sketchbook
from mlotool.report.formats import shortened
from mlotool.report.palette import light
from mlotool.report.rank_correlation import RankCorrelation, rank_correlation
from mlotool.report.sweep_settings import Comparison
from mlotool.report.visible_range import visible_range

MIN_PAIRS = 3


def inherited_pairs(comparison: Comparison) -> list[tuple[float, float]]:
    """Return the objective of each finished job before its first tick, with inherited weights, and in the end."""
    key = f"inherited/{comparison.objective}"
    rows = [row for row in comparison.rows if row.status == "finished" and row.value is not None]
    pairs = [(row.metrics[key], row.value or 0.0) for row in rows if key in row.metrics]
    return [pair for pair in pairs if all(map(math.isfinite, pair))]


def inherited_cards(book: Sketchbook, comparison: Comparison) -> list[Card]:
    """Draw them with the correlation of their ranks; nothing below three jobs with both."""
    pairs = inherited_pairs(comparison)
    if len(pairs) < MIN_PAIRS:
        return []
    figure, axes = book.new()
    before, after = (visible_range([pair[which] for pair in pairs]) for which in (0, 1))
    axes.plot(
        before.clip([pair[0] for pair in pairs]), after.clip([pair[1] for pair in pairs]), "o",
        color=light("problem-0"), alpha=0.6, markersize=4.5,
    )  # fmt: skip
    after.apply(axes)
    axes.set_xlabel(shortened(f"{comparison.objective}, inherited weights", 60))
    axes.set_ylabel(shortened(f"{comparison.objective}, trained", 40))
    note = correlation_note(rank_correlation(pairs))
    return [book.finish(figure, "inherited", "Inherited and trained", note)]


def correlation_note(found: RankCorrelation) -> str:
    """Say what a correlation is, in a sentence.

    Example:
        >>> correlation_note(RankCorrelation(0.5, 0.1, 0.8, 20))
        'Rank correlation (Spearman) of 20 jobs: 0.50, bootstrap interval of 95 % from 0.10 to 0.80.'
    """
    if math.isnan(found.value):
        return f"The {found.num_pairs} jobs have no rank correlation: one of the two is the same for all."
    interval = f"bootstrap interval of 95 % from {found.low:.2f} to {found.high:.2f}"
    return f"Rank correlation (Spearman) of {found.num_pairs} jobs: {found.value:.2f}, {interval}."
