"""A metric that is a function of the user's."""

from collections.abc import Callable, Container, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from mlotool.config.schema import is_plain_name
from mlotool.core.bound_module import BoundModule
from mlotool.core.described import kind_of
from mlotool.core.unchanged import is_unchanged, snapshot
from mlotool.core.user_code import Call, WrongResultError, noted

MetricFunction = Callable[[BoundModule, Any], Mapping[str, Any]]
"""Returns tensors by name: 0-D, a mean over the batch, or one value a sample."""

MAX_NAMED = 5
"""Names that a message has."""

_EXPECTED = "a dict from a name to a 0-D tensor (a mean over the batch) or to a tensor with one value a sample"


class FunctionMetric:
    """The means over a split of what a function `f(module, batch) -> {name: Tensor}` returns.

    Args:
        key: where the config names it.
        function: 0-D results count as often as their batch has samples.
    """

    def __init__(self, key: str, function: MetricFunction) -> None:
        self._key = key
        self._function = function
        self._totals: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        # Of its first batch; they are not forgotten, since the evaluations of a run are compared by name.
        self._names: list[str] = []

    def reset(self) -> None:
        """Forget the batches so far."""
        self._totals, self._counts = {}, {}

    def update(self, module: BoundModule, batch: Any, size: int) -> None:
        """Take a batch.

        Args:
            module: in eval mode.
            batch: as the data set collates it.
            size: its number of samples.
        """
        with noted(lambda: self._call({"batch": batch})):
            result = self._function(module, batch)
            if not isinstance(result, Mapping) or not result:
                raise WrongResultError(kind_of(result), _EXPECTED, 'Return {"name": values.mean()}.')
            for name, value in result.items():
                self._add(name, value, size)
            self._check_names(list(result))

    def rehearse(self, module: BoundModule, batch: Any, size: int) -> None:
        """Take a batch, and refuse a function that changes it, or the module."""
        given = dict(module.named_parameters()), batch
        before = snapshot(given)
        self.update(module, batch, size)
        with noted(lambda: self._call({"batch": batch})):
            if not is_unchanged(before, (dict(module.named_parameters()), batch)):
                raise WrongResultError(
                    "its numbers, and a batch or a module that it has changed",
                    "one that leaves both as they are, since other metrics and the training use them",
                    "Write x = x * 2 in place of x.mul_(2), and copy a dict before changing its keys.",
                )

    def compute(self, taken: Container[str]) -> dict[str, float]:
        """Return the means.

        Args:
            taken: names that other metrics have.
        """
        with noted(lambda: self._call({})):
            for name in self._totals:
                if name in taken:
                    raise WrongResultError(f"the name '{name}'", "a name that no other metric has", "Rename it.")
            return {name: float(total) / self._counts[name] for name, total in self._totals.items()}

    def _add(self, name: Any, value: Any, size: int) -> None:
        if not is_plain_name(name):
            wanted = "letters, digits, '-', '_' and '.', as it is logged as <split>/<name>"
            raise WrongResultError(f"the name {name!r}", wanted, "Rename it.")
        if isinstance(value, Real):
            value = torch.tensor(float(value))
        if not isinstance(value, Tensor) or value.shape not in ((), (size,)):
            found = f"{kind_of(value)} as '{name}' for {size} samples"
            advice = "Take the mean over the other axes."
            if not isinstance(value, Tensor):
                advice = "Make it a number or a tensor: float(x), torch.as_tensor(x)."
            raise WrongResultError(found, f"a tensor of shape () or ({size},)", advice)
        if value.is_complex():
            raise WrongResultError(f"complex numbers as '{name}'", "real ones", "Take .abs() or .real of them.")
        if value.is_sparse or value.is_meta:
            kind = "on the device 'meta'" if value.is_meta else "sparse"
            raise WrongResultError(f"a tensor that is {kind} as '{name}'", "one with its values", "Make it dense.")
        total = value.double().sum() if value.dim() else value.double() * size
        self._totals[name] = self._totals.get(name, 0.0) + total
        self._counts[name] = self._counts.get(name, 0) + size

    def _check_names(self, names: list[str]) -> None:
        self._names = self._names or names
        changes = [f"'{name}' is new" for name in names if name not in self._names]
        changes += [f"'{name}' is missing" for name in self._names if name not in names]
        if changes:
            raise WrongResultError(
                f"other names than for its first batch: {', '.join(changes[:MAX_NAMED])}",
                "the same names for every batch",
                "Return a value for each name every time.",
            )

    def _call(self, given: Mapping[str, Any]) -> Call:
        return Call(self._key, self._function, given, _EXPECTED, "Correct the function.")
