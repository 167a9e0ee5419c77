"""Decisions of the models of a sweep's job, made without training: its modules are built, without their values."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlotool.config.checks import checked
from mlotool.config.composition import compose
from mlotool.config.reading import leaves
from mlotool.config.sweep_plan import SweepPlan
from mlotool.config.trusted import is_of_user, resolve
from mlotool.config.without_values import WithoutValues
from mlotool.core.errors import ConfigError, InfeasibleModelError, RefusedModelError

if TYPE_CHECKING:
    from mlotool.spaces.decisions import Decide, Value

SPACE = "mlotool.spaces.Space"
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
        self._fixed = [word for word in plan.fixed if not word.startswith("hydra.")]
        self._without_values = WithoutValues()
        self._composed: tuple[tuple[str, ...], Mapping[str, Any]] | None = None
        first = [f"{each.key}={each.first}" for each in plan.dimensions]
        self.is_needed = False
        self._are_modules_fixed = not any(".module" in each.key for each in plan.dimensions)
        # A choice that is wrong fails in a job of its own, as others may be right.
        for words in (first, []):
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
        self.is_needed = any(_targets(each) & {SPACE} for each in modules)
        if self.is_needed:
            try:
                values, _ = checked(compose(None, [*self._fixed, *words]), targets=True)
                _resolve_modules(values)
            except ConfigError as error:
                self._refuse_modules(error)
        if self.is_needed or any(map(is_of_user, set().union(*map(_targets, modules)))):
            try:
                self.is_needed |= bool(self.draw(words, lambda name, candidates: candidates[0]))
            except RefusedModelError as error:
                raise ConfigError(f"{error} These are the first candidates of all decisions.") from error
            except InfeasibleModelError:
                self.is_needed = True

    def _refuse_modules(self, error: ConfigError) -> None:
        """Raise those of a config's faults that are in modules which each job has: there each draw would fail."""
        faults = [line for line in str(error).splitlines() if _OF_MODULE.match(line)]
        if faults and self._are_modules_fixed:
            raise ConfigError("\n".join(faults)) from error

    def draw(self, words: Sequence[str], decide: "Decide") -> "dict[str, Value]":
        """Make the decisions of a job that its recipe does not make.

        Args:
            words: what the job overrides.
            decide: makes one; asked again for a name, it gives the same answer.

        Returns:
            Those that were asked of `decide`, by name.

        Raises:
            InfeasibleModelError: decisions make no model.
            ConfigError: the config is wrong, or a module cannot be built.
        """
        values = self._values(words)
        return self._without_values(lambda: _decisions(values, decide))

    def _values(self, words: Sequence[str]) -> Mapping[str, Any]:
        key = tuple(words)
        if self._composed is None or self._composed[0] != key:
            self._composed = key, checked(compose(None, [*self._fixed, *words]), targets=False)[0]
        return self._composed[1]


def _resolve_modules(values: Mapping[str, Any]) -> None:
    """Look for every class that modules name; the signatures of those that a package re-exports are not read before."""
    for name, problem in values["problems"].items():
        for key, value in leaves(problem["module"]):
            if key.rpartition(".")[2] == "_target_":
                resolve(f"problems.{name}.module.{key}".removesuffix("._target_"), value)


def _targets(node: Any) -> set[Any]:
    return {value for key, value in leaves(node) if key.rpartition(".")[2] == "_target_"}


def _decisions(values: Mapping[str, Any], decide: "Decide") -> "dict[str, Value]":
    from mlotool.config.building import build_modules
    from mlotool.spaces.decisions import check_asked

    given: Mapping[str, Any] = values["decisions"]
    asked: dict[str, Value] = {}

    def made(name: str, candidates: "tuple[Value, ...]") -> "Value":
        if name in given:
            found: Value = given[name]
            return found
        # There is nothing to decide between one.
        value = candidates[0] if len(candidates) == 1 else decide(name, candidates)
        if len(candidates) > 1:
            asked[name] = value
        return value

    check_asked(given, build_modules(values, made).made)
    return asked
