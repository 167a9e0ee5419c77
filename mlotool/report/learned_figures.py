"""What small upper problems have learned over time: a card for each, with a curve for each of its values."""

from collections.abc import Mapping, Sequence

from mlotool.report.curves import LEARNED, Line, curve_card
from mlotool.report.figure import Card, Sketchbook
from mlotool.report.palette import NUM_PROBLEM_COLOURS
from mlotool.report.series import Series

STYLES = ("-", "--", ":", "-.")
MAX_NAMED = 8
"""Curves of one card that the legend tells apart; more are drawn in the problem's colour."""


def split_learned(series: Sequence[Series]) -> tuple[list[Series], list[Series]]:
    """Return the learned values of upper problems, and the other series."""
    learned = [each for each in series if each.metric.startswith(LEARNED)]
    return learned, [each for each in series if not each.metric.startswith(LEARNED)]


def learned_cards(book: Sketchbook, series: Sequence[Series], colours: Mapping[str, str]) -> list[Card]:
    """Draw the learned values of each problem in one card."""
    cards = []
    for owner, colour in colours.items():
        group = [each for each in series if each.owner == owner]
        if not group:
            continue
        names = [each.metric.removeprefix(LEARNED).replace("_", " ") for each in group]
        if len(group) > MAX_NAMED:
            lines = [Line(colour, "-", "", f"{len(group)} values") for _ in group]
        elif len(group) > 1:
            lines = [
                Line(f"problem-{index % NUM_PROBLEM_COLOURS}", STYLES[index % len(STYLES)], "", name)
                for index, name in enumerate(names)
            ]
        else:
            lines = [Line(colour, "-", "", names[0])]
        title = f"{owner}: learned {names[0]}" if len(group) == 1 else f"{owner}: the {len(group)} learned values"
        cards.append(curve_card(book, f"learned-{owner}", title, group, lines, num_named=MAX_NAMED))
    return cards
