"""The points of a sweep, composed and checked before any is started."""

from collections.abc import Iterator, Sequence
from itertools import islice

from mlotool.config.checks import check
from mlotool.config.composition import compose
from mlotool.config.sweep_plan import SweepPlan
from mlotool.core.errors import ConfigError

MAX_LOOKED_AT = 200
"""So many values of a sweep are looked at, each in a config of its own."""


def check_first_point(plan: SweepPlan) -> None:
    """Refuse a sweep whose keys there are not, or whose intervals begin where no value may be.

    What is wrong with these is wrong with all jobs. A choice that is wrong fails in a job of its own, as others may be
    right.

    Raises:
        ConfigError: with what is wrong.
    """
    words = _first(plan)
    faults = _faults_of(plan, words)
    of_all = ("sweep.", *(f"{each.key.lstrip('+')}: " for each in plan.dimensions if not each.choices))
    found = [line for line in faults if line.startswith(of_all)]
    if found:
        raise ConfigError("\n".join(found))


def choice_faults(plan: SweepPlan) -> list[str]:
    """Return what is wrong with the values of a sweep, each beside the first ones of the other keys."""
    first = _first(plan)
    faults = _faults_of(plan, first)
    for place, word in islice(_others(plan), MAX_LOOKED_AT):
        faults += _faults_of(plan, [*first[:place], word, *first[place + 1 :]])
    return list(dict.fromkeys(faults))


def _others(plan: SweepPlan) -> Iterator[tuple[int, str]]:
    """Yield the values after the first ones, with the places of their keys; of an interval its other end."""
    for place, each in enumerate(plan.dimensions):
        values = each.choices[1:]
        if not each.choices and each.high is not None:
            values = (str(int(each.high) if each.whole else each.high),)
        for value in values:
            yield place, f"{each.key}={value}"


def _first(plan: SweepPlan) -> list[str]:
    return [f"{each.key}={each.first}" for each in plan.dimensions]


def _faults_of(plan: SweepPlan, words: Sequence[str]) -> list[str]:
    """Return what is wrong with a point."""
    try:
        check(compose(None, [*(word for word in plan.fixed if not word.startswith("hydra.")), *words]))
    except ConfigError as error:
        return str(error).splitlines()
    return []
