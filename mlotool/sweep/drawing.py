"""Decisions of the models of a sweep's job, made without training: its modules are built, without their values."""

import logging
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

from mlotool.config.checks import checked
from mlotool.config.security.trusted import is_of_user
from mlotool.config.sweeps.sweep_plan import SweepPlan, job_config
from mlotool.core.errors import ConfigError, InfeasibleModelError, MlotoolError, RefusedModelError
from mlotool.core.messages import did_you_mean, shown
from mlotool.folders.documents import leaves

if TYPE_CHECKING:
    from mlotool.spaces.decisions import Decide, Value


T = TypeVar("T")


class WithoutValues:
    """Builds modules without the values of their tensors; with them once code of the user's has asked for some."""

    def __init__(self) -> None:
        self._is_with_values = False

    def __call__(self, build: Callable[[], T]) -> T:
        """Return what a function builds.

        Args:
            build: may be called twice.

        Raises:
            InfeasibleModelError: decisions make no model.
            ConfigError: it cannot be built.
        """
        from mlotool.core.private import FakeTensorMode

        # Torch logs each operation that refuses its shapes, with a traceback; here that is an answer.
        logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)
        if self._is_with_values:
            return build()
        # Torch logs each operation that refuses its shapes, with a traceback; here that is an answer.
        logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return build()
        except RefusedModelError:
            # What refuses tensors without values may take others.
            pass
        except InfeasibleModelError:
            raise
        except ConfigError as error:
            if isinstance(_first_cause(error), MlotoolError):
                raise
        # Code of the user's may need values.
        built = build()
        self._is_with_values = True
        return built


def _first(_: str, candidates: "Sequence[Value]") -> "Value":
    return candidates[0]


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


SPACE = "mlotool.spaces.Space"
_NUM_LOOKED_AT = 50
_OF_MODULE = re.compile(r"problems\.[^.]+\.module\b")


class Drawer:
    """Draws the decisions of jobs.

    Args:
        plan: the sweep.

    Attributes:
        is_needed: whether modules ask for decisions: one is a space, or code of the user's calls `choose`.

    Raises:
        ConfigError: a module cannot be built, or one of its targets does not accept its settings.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self._plan = plan
        self._without_values = WithoutValues()
        self._composed: tuple[tuple[str, ...], Mapping[str, Any]] | None = None
        self.is_needed = False
        self._are_modules_fixed = not any(".module" in dimension.key for dimension in plan.dimensions)
        # A choice that is wrong fails in a job of its own, as others may be right.
        for words in (plan.first_words, []):
            try:
                self._values(words)
            except ConfigError as error:
                if not plan.dimensions:
                    raise
                self._refuse_modules(error)
                continue
            self._look(words)
            return

    def _look(self, words: Sequence[str]) -> None:
        modules = [problem["module"] for problem in self._values(words)["problems"].values()]
        self.is_needed = any(SPACE in _targets(module) for module in modules)
        if self.is_needed:
            try:
                checked(job_config(self._plan, words), targets=True)
            except ConfigError as error:
                self._refuse_modules(error)
        if self.is_needed or any(map(is_of_user, set().union(*map(_targets, modules)))):
            try:
                drawn = self.draw(words, _first)
                self.is_needed |= any(value is not None for value in drawn.values())
            except RefusedModelError as error:
                raise ConfigError(f"{error} These are the first candidates of all decisions.") from error
            except InfeasibleModelError:
                self.is_needed = True
            self._check_asked(words)

    def _refuse_modules(self, error: ConfigError) -> None:
        """Raise those of a config's faults that are in modules which each job has: there each draw would fail."""
        faults = [line for line in str(error).splitlines() if _OF_MODULE.match(line)]
        if faults and self._are_modules_fixed:
            raise ConfigError("\n".join(faults)) from error

    def _check_asked(self, words: Sequence[str]) -> None:
        """Refuse a decision of the recipe that no model asks for, as far as some of them show."""
        values = self._values(words)
        fixed: Mapping[str, Any] = values["decisions"]
        seen: dict[str, None] = {}
        generator = random.Random(0)
        for decide in (_first, *repeat(lambda _, candidates: generator.choice(candidates), _NUM_LOOKED_AT - 1)):
            if fixed.keys() <= seen.keys():
                return
            # One that makes no model has asked as well.
            with suppress(ConfigError):
                self._without_values(partial(_decisions, values, decide, seen))
        for name in [name for name in fixed if name not in seen]:
            raise ConfigError(
                f"decisions.{name}: found {shown(fixed[name])}, but none of {_NUM_LOOKED_AT} models asks for it; "
                f"expected one of {', '.join(seen) or 'none'}.{did_you_mean(name, list(seen))} Correct the name."
            )

    def draw(self, words: Sequence[str], decide: "Decide") -> "dict[str, Value | None]":
        """Make the decisions of a job that its recipe does not make.

        Args:
            words: what the job overrides.
            decide: makes one; asked again for a name, it gives the same answer.

        Returns:
            Those that were asked of `decide`, by name; and None for those that the recipe makes, but the models do not
            ask for.

        Raises:
            InfeasibleModelError: decisions make no model.
            ConfigError: the config is wrong, or a module cannot be built.
        """
        values = self._values(words)
        return self._without_values(lambda: _decisions(values, decide))

    def _values(self, words: Sequence[str]) -> Mapping[str, Any]:
        key = tuple(words)
        if self._composed is None or self._composed[0] != key:
            self._composed = key, checked(job_config(self._plan, words), targets=False)[0]
        return self._composed[1]


def _targets(node: Any) -> set[Any]:
    return {value for key, value in leaves(node) if key.rpartition(".")[2] == "_target_"}


def _decisions(
    values: Mapping[str, Any], decide: "Decide", seen: dict[str, None] | None = None
) -> "dict[str, Value | None]":
    from mlotool.config.building import build_modules

    fixed: Mapping[str, Any] = values["decisions"]
    asked: dict[str, Value | None] = {}
    names = {} if seen is None else seen

    def made(name: str, candidates: "tuple[Value, ...]") -> "Value":
        names[name] = None
        if name in fixed:
            value: Value = fixed[name]
            return value
        # There is nothing to decide between one.
        value = candidates[0] if len(candidates) == 1 else decide(name, candidates)
        if len(candidates) > 1:
            asked[name] = value
        return value

    all_made = build_modules(values, made).made
    return asked | {name: None for name in fixed if name not in all_made}
