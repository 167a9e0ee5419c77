"""Colours of the page and of its figures, in a light and a dark reading.

Problems take their colours in the order of the recipe, from a variant of the Okabe-Ito palette that colour-blind
readers can tell apart, darkened (light mode) or lightened (dark mode) until each has 3:1 against its background.
"""

import re
from collections.abc import Iterable

# name: (light, dark). Each light colour occurs once, so that it can be found again in a finished SVG.
THEME: dict[str, tuple[str, str]] = {
    "page": ("#f6f7f9", "#101318"),
    "card": ("#fdfdfe", "#181c23"),
    "ink": ("#1b2129", "#e8ebef"),
    "muted": ("#5a6472", "#9ba5b3"),
    "line": ("#dde1e7", "#2d343e"),
    "problem-0": ("#0072b2", "#5ab4f0"),
    "problem-1": ("#cf5300", "#ff8f45"),
    "problem-2": ("#00875f", "#35c99c"),
    "problem-3": ("#b2528f", "#e58fc3"),
    "problem-4": ("#946800", "#e0b13e"),
    "problem-5": ("#5a4fb8", "#a99eff"),
    "problem-6": ("#2b8fbf", "#8ed8f8"),
    "problem-7": ("#7d5a3c", "#cfb08a"),
    "right": ("#7b8593", "#8a95a4"),
    "wrong": ("#c2185b", "#ff6b9d"),
    "finished": ("#1a7f4b", "#4cc38a"),
    "failed": ("#c62f2f", "#ff7b72"),
    "interrupted": ("#9a6500", "#e3b04b"),
}
NUM_PROBLEM_COLOURS = 8


def light(name: str) -> str:
    """Return the light mode's hex colour: the one of the PNG files."""
    return THEME[name][0]


def variable(name: str) -> str:
    """Return the CSS expression of a colour that follows the reader's mode."""
    return f"var(--{name})"


def problem_colours(problems: Iterable[str]) -> dict[str, str]:
    """Return each problem's colour name; beyond eight problems the colours repeat."""
    return {problem: f"problem-{index % NUM_PROBLEM_COLOURS}" for index, problem in enumerate(problems)}


def themed(svg: str) -> str:
    """Return the SVG with every colour of the light theme replaced by its CSS variable."""
    names = {pair[0]: name for name, pair in THEME.items()}
    pattern = re.compile("|".join(re.escape(colour) for colour in names), re.IGNORECASE)
    return pattern.sub(lambda match: variable(names[match.group().lower()]), svg)


def css_variables() -> str:
    """Return the rules that define the colours for both modes."""

    def rule(mode: int) -> str:
        return ":root{" + "".join(f"--{name}:{pair[mode]};" for name, pair in THEME.items()) + "}"

    return f"{rule(0)}\n@media (prefers-color-scheme: dark){{{rule(1)}}}"
