"""Decisions of a space of models: each has a name and candidates, and is made when a model is built."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError, InfeasibleModelError, RefusedError, RefusedModelError
from mlotool.core.messages import did_you_mean, shown

# What a candidate is called: a name, or a whole number.
Value = str | int

# Makes a decision: its name and the names of its candidates in, one of these out.
Decide = Callable[[str, tuple[Value, ...]], Value]

_NAME = re.compile(r"[a-z0-9_]{1,100}")
_MAX_CANDIDATES = 10_000


@dataclass(frozen=True)
class Decision:
    """A decision that was made.

    Args:
        name: the decision's name.
        candidates: the candidates, in their order.
        value: the candidate that was taken.
    """

    name: str
    candidates: tuple[Value, ...]
    value: Value


@dataclass
class Decisions:
    """The decisions of the models that are built together, in the order in which they were made.

    Args:
        decide: makes them.
        made: those that were made, by name.
        again: those of what is made once more, which are not asked for again.
    """

    decide: Decide
    made: dict[str, Decision] = field(default_factory=dict)
    again: Mapping[str, Decision] = field(default_factory=dict)

    def take(self, name: str, candidates: Sequence[Value]) -> Value:
        """Make a decision; see `choose`."""
        names = tuple(candidates)
        _check(name, names)
        if name in self.again and self.again[name].candidates == names:
            return self.again[name].value
        if name in self.made:
            raise ConfigError(f"decisions.{name}: found two decisions of this name. Give one of them another name.")
        check_number(name, len(self.made))
        value = self.decide(name, names)
        is_candidate = any(value == known and type(value) is type(known) for known in names)
        hint = "" if is_candidate else did_you_mean(str(value), [str(known) for known in names])
        advice = f"{hint} Correct it, or leave it out to take the first candidate.".strip()
        require(is_candidate, f"decisions.{name}", value, f"one of {_listed(names)}", advice)
        self.made[name] = Decision(name, names, value)
        return value

    @property
    def values(self) -> dict[str, Value]:
        """What was decided, by name."""
        return {name: decision.value for name, decision in self.made.items()}


_current: ContextVar[Decisions | None] = ContextVar("decisions", default=None)


@contextmanager
def deciding(decide: Decide | Mapping[str, Value] | None = None) -> Iterator[Decisions]:
    """Make the decisions of the models that are built inside the block.

    Args:
        decide: a function that makes each decision, or a mapping with some of them by name; a decision that it lacks
            takes the first candidate.

    Yields:
        The decisions, which fill up while models are built.

    Raises:
        ConfigError: at the end of the block, for a name of the mapping that no model has asked for.

    Example:
        >>> with deciding({"width": 64}) as decisions:
        ...     choose("width", [32, 64]), choose("activation", ["relu", "tanh"])
        (64, 'relu')
        >>> decisions.values
        {'width': 64, 'activation': 'relu'}
    """
    given = {} if decide is None else decide
    decisions = Decisions(by_mapping(given) if isinstance(given, Mapping) else given)
    token = _current.set(decisions)
    try:
        yield decisions
    finally:
        _current.reset(token)
    if isinstance(given, Mapping):
        check_asked(given, decisions.made)


@contextmanager
def decisions_of(given: Mapping[str, Value] | None) -> Iterator[Decisions]:
    """Make decisions by a mapping; where it is None by the block around this one, or else the first candidates."""
    around = _current.get()
    if given is None and around is not None:
        yield around
        return
    with deciding(given) as decisions:
        yield decisions


@contextmanager
def refused_as_decided() -> Iterator[None]:
    """Take what a constructor refuses for decisions that make no model, once the block has made some.

    Raises:
        RefusedModelError: a constructor refuses its settings, after a choice between several candidates.
    """
    around = _current.get()
    before = set() if around is None else set(around.made)
    try:
        yield
    except RefusedError as error:
        made = {} if around is None else around.made
        if not any(len(decision.candidates) > 1 for name, decision in made.items() if name not in before):
            raise
        raise RefusedModelError(str(error)) from error


@contextmanager
def as_before(made: dict[str, Decision]) -> Iterator[None]:
    """Let what is made inside the block, once more, decide as it did the first time.

    Args:
        made: what it has decided; gets what it decides now.
    """
    decisions = _current.get()
    if decisions is None:
        yield
        return
    around, before = decisions.again, set(decisions.made)
    decisions.again = dict(made)
    try:
        yield
    finally:
        decisions.again = around
    made |= {name: decision for name, decision in decisions.made.items() if name not in before}


def check_number(name: str, num_made: int) -> None:
    """Refuse one decision more than a program may have.

    Raises:
        InfeasibleModelError: there are as many already.
    """
    if num_made >= MAX_DECISIONS:
        fault = f"found more than {MAX_DECISIONS:,} decisions of one program, of which '{name}' is the next"
        raise InfeasibleModelError(f"{fault}. Lower steps and counts; a Grow makes new decisions in each of its steps.")


def check_asked(given: Mapping[str, Value], made: Mapping[str, Decision]) -> None:
    """Refuse decisions that no model has asked for.

    Raises:
        ConfigError: with the names that were asked for.
    """
    for name in given:
        if name not in made:
            fault = f"found {shown(given[name])}, but no model asks for a decision of this name"
            expected = f"one of {_listed(made)}" if made else "none, as no problem has a space"
            advice = f"{did_you_mean(str(name), list(made))} Correct the name, or remove it."
            raise ConfigError(f"decisions.{str(name)[:100]}: {fault}; expected {expected}.{advice}")


def choose(name: str, candidates: Sequence[Any] | Mapping[Value, Any]) -> Any:
    """Make a decision while a model is built: in a constructor, or in a mutator.

    In a search, the sweep's sampler decides. Otherwise the recipe's `decisions` do; a decision that they lack takes the
    first candidate. Which decisions are asked for may depend on earlier ones.

    Args:
        name: the decision's name, of a-z, 0-9 and `_`; unique in the program.
        candidates: names or whole numbers; or a mapping from these to the values to return.

    Returns:
        The candidate, or its value in the mapping.

    Raises:
        ConfigError: a decision of this name was made before, a name has other characters, or there are no candidates.

    Source: Zhang et al. 2020, Retiarii, section 3.2 (`choose`).

    Example:
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         width = choose("width", [8, 16])
        ...         self.activation = choose("activation", {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh})()
        ...         self.layer = torch.nn.Linear(4, width)
        >>> with deciding({"activation": "tanh"}):
        ...     Net()
        Net(
          (activation): Tanh()
          (layer): Linear(in_features=4, out_features=8, bias=True)
        )
    """
    decisions = _current.get() or Decisions(by_mapping({}))
    value = decisions.take(name, tuple(candidates))
    return candidates[value] if isinstance(candidates, Mapping) else value


def by_mapping(values: Mapping[str, Value]) -> Decide:
    """Return what decides by a mapping, and takes the first candidate where a name is not in it."""
    return lambda name, candidates: values.get(name, candidates[0])


# Of the models of a program.
MAX_DECISIONS = 2_000

# The name that no decision has: sweeps tell runs by it that differ in nothing else.
RESERVED = "seed"


def is_name(text: Any) -> bool:
    """Say whether a text may name a decision or a candidate."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def _check(name: str, candidates: tuple[Value, ...]) -> None:
    expected = "a name of a-z, 0-9 and '_', of at most 100 characters, but not 'seed'"
    require(is_name(name) and name != RESERVED, "decision", name, expected, "Correct the mutator's or choice's name.")
    wrong = [value for value in candidates if type(value) is not int and not is_name(value)]
    is_right = not wrong and 0 < len(candidates) <= _MAX_CANDIDATES and len(set(candidates)) == len(candidates)
    expected = f"1 to {_MAX_CANDIDATES} different names of a-z, 0-9 and '_', or whole numbers"
    require(is_right, f"decision '{name}': its candidates", wrong[0] if wrong else candidates, expected)


def _listed(names: Any) -> str:
    texts = [str(name) for name in names]
    return ", ".join(texts) if len(texts) <= 12 else f"{', '.join(texts[:10])}, .. ({len(texts)} in all)"
