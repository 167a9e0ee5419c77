"""How many models a space has, found by building some of them without values."""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces.decisions import Decide, Decision, Decisions, Value

Made = Mapping[str, tuple[Value, ...]]
"""The candidates of the decisions that a build has asked for, by name."""

NUM_RANDOM = 4
"""Random models that are built to see whether decisions change each other."""

FEW = 50
"""Of so many models each is built, and those that fit are counted."""


@dataclass(frozen=True)
class SpaceSize:
    """How many models a space has.

    Args:
        number: of models.
        bound: "" where it is the number; "at least" or "at most" where it is a bound.
        reason: how it was found.
    """

    number: int
    bound: str
    reason: str

    def __str__(self) -> str:
        """Return it in words."""
        bound = f"{self.bound} " if self.bound else ""
        return f"{bound}{_readable(self.number)} model{'' if self.number == 1 else 's'}: {self.reason}"


class _SpentError(Exception):
    """No more builds are to be made."""


@dataclass
class _Builds:
    """Builds models, and says what was asked for.

    Args:
        build: builds the model of a function that decides.
        start: values of decisions, where nothing else is said.
        most: how many builds there may be.
        seconds: how long all of them may take.
    """

    build: Callable[[Decide], Decisions]
    start: Mapping[str, Value]
    most: int
    seconds: float
    num: int = 0
    num_infeasible: int = 0
    models: set[frozenset[tuple[str, Value]]] = field(default_factory=set)
    _began: float = field(default_factory=time.monotonic)

    def ask(self, values: Mapping[str, Value]) -> Made | None:
        """Return the decisions of the model of some values; None where it is none."""
        every = {**self.start, **values}
        return self.by(lambda name, candidates: _taken(every, name, candidates))

    def by(self, decide: Decide) -> Made | None:
        """Return the decisions of a model; None where it is none."""
        if self.num >= self.most or time.monotonic() - self._began > self.seconds:
            raise _SpentError
        self.num += 1
        try:
            made = self.build(decide).made
        except InfeasibleModelError:
            self.num_infeasible += 1
            return None
        self.models.add(frozenset((name, decision.value) for name, decision in made.items()))
        return _candidates(made)


def space_size(
    build: Callable[[Decide], Decisions], taken: Mapping[str, Decision], most: int = 200, seconds: float = 20.0
) -> SpaceSize:
    """Count the models of a space.

    Where there are few, each is built. Else the numbers of candidates are multiplied, if no decision changes which
    others there are; models in which all decisions are other ones, and then models that differ in one, are built to see
    that. Where some do, what they decide is walked through, and the rest multiplied.

    Args:
        build: builds the model of a function that decides, and returns what was asked for; an InfeasibleModelError is
            for decisions that make none. Tensors without values do (FakeTensorMode).
        taken: the decisions of a model that can be built.
        most: how many builds there may be.
        seconds: how long they may take.

    Returns:
        the number, and whether it is a bound.

    Example:
        >>> from mlotool.spaces.decisions import by_mapping
        >>> def build(decide):
        ...     with deciding(decide) as decisions:
        ...         [choose(f"kernel_{i}", [1, 3, 5]) for i in range(choose("depth", [1, 2, 3]))]
        ...     return decisions
        >>> space_size(build, build(by_mapping({})).made).number
        39
    """
    first, start = _candidates(taken), {name: decision.value for name, decision in taken.items()}
    if not first:
        return SpaceSize(1, "", "nothing is decided")
    if _product(first) <= FEW:
        few = _Builds(build, start, 2 * FEW, seconds / 2)
        try:
            number = sum(_Walk(few, is_whole=True).counts({}, first))
        except _SpentError:
            pass
        else:
            left = f"; {few.num_infeasible} other choices make no model" if few.num_infeasible else ""
            return SpaceSize(number, "", f"each was built once, without values{left}")
    return _Walk(_Builds(build, start, most, seconds)).size(first)


class _Walk:
    """Goes through what decides which decisions there are, and multiplies the rest.

    Args:
        builds: of models.
        is_whole: whether it goes through all decisions, so that each model is built.
    """

    def __init__(self, builds: _Builds, *, is_whole: bool = False) -> None:
        self._builds, self._is_whole = builds, is_whole
        self._seen: set[str] = set()
        self._deciding: dict[str, None] = {}

    def size(self, first: Made) -> SpaceSize:
        """Return the number of models, or a bound of it."""
        number, builds = 0, self._builds
        try:
            # Each is a part of the space that no other has models of.
            for count in self.counts({}, first):
                number += count
        except _SpentError:
            known = {name: first[name] for name in first if name in self._seen - self._deciding.keys()}
            # Where some make no model, those that were built are all that is certain.
            built = len(builds.models)
            number = built if builds.num_infeasible else max(number, _product(known), built)
            return SpaceSize(number, "at least", f"the count ended after {builds.num} builds of models without values")
        if builds.num_infeasible:
            how = f"so many choices; {builds.num_infeasible} of {builds.num} that were built make no model"
            return SpaceSize(number, "at most", how)
        if not self._deciding:
            return SpaceSize(number, "", f"{len(first)} decisions, none of which changes the others")
        few = ", ".join([*self._deciding][:3]) + (", .." if len(self._deciding) > 3 else "")
        return SpaceSize(number, "", f"counted by all values of {few}, which change what else is decided")

    def counts(self, fixed: Mapping[str, Value], made: Made | None) -> Iterator[int]:
        """Yield numbers of models, whose sum is that of the models with some values."""
        if made is None:
            return
        free = {name: candidates for name, candidates in made.items() if name not in fixed}
        name = next((name for name in free if self._is_whole or name in self._deciding), None)
        if name is None:
            probes = [self._builds.ask({**fixed, **values}) for values in _probes(free, self._builds.start)]
            if any(probe != made for probe in probes):
                name = self._deciding_one(fixed, made, free)
            if name is None and any(probe not in (None, made) for probe in probes):
                raise _SpentError
        if name is None:
            yield _product(free)
            return
        for value in free[name]:
            is_known = value == _taken(self._builds.start, name, free[name])
            values = {**fixed, name: value}
            yield from self.counts(values, made if is_known else self._builds.ask(values))

    def _deciding_one(self, fixed: Mapping[str, Value], made: Made, free: Made) -> str | None:
        """Return a decision that alone changes which others there are; behind fixed values it may be one more."""
        for names in (free.keys() - self._seen, free):
            for name in sorted(names, key=list(free).index):
                self._seen.add(name)
                others = (value for value in free[name] if value != _taken(self._builds.start, name, free[name]))
                if any(self._builds.ask({**fixed, name: value}) not in (None, made) for value in others):
                    self._deciding[name] = None
                    return name
        return None


def _taken(values: Mapping[str, Value], name: str, candidates: tuple[Value, ...]) -> Value:
    """Decide by values, or by the first candidate where they have none of them."""
    return values[name] if values.get(name) in candidates else candidates[0]


def _probes(made: Made, start: Mapping[str, Value]) -> Iterator[dict[str, Value]]:
    """Yield models far from the start: in each all decisions are others, then random ones."""
    several = {name: candidates for name, candidates in made.items() if len(candidates) > 1}
    others = {
        name: [value for value in every if value != _taken(start, name, every)] for name, every in several.items()
    }
    for step in range(max(map(len, others.values()), default=0)):
        yield {name: values[step % len(values)] for name, values in others.items()}
    generator = random.Random(0)
    for _ in range(NUM_RANDOM if len(several) > 1 else 0):
        yield {name: generator.choice(candidates) for name, candidates in several.items()}


def _candidates(made: Mapping[str, Decision]) -> dict[str, tuple[Value, ...]]:
    return {name: decision.candidates for name, decision in made.items()}


def _product(made: Made) -> int:
    return math.prod(len(candidates) for candidates in made.values())


def _readable(number: int) -> str:
    # Whole numbers of any size, which floats are not.
    digits = str(number)
    return f"{number:,}" if number < 10**15 else f"about {digits[0]}.{digits[1]}e{len(digits) - 1}"
