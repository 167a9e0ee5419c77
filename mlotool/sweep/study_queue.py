"""Values of trials that the user has queued in a study: those that the sweep does not have are drawn instead."""

import warnings
from collections.abc import Container
from typing import Any


def ask(study: Any, distributions: dict[str, Any]) -> Any:
    """Return the next trial, a queued one first, with a value from each distribution."""
    trial = study.ask()
    for name, distribution in distributions.items():
        forget_unknown(trial, name, _Values(distribution))
        # `study.ask(distributions)` does the same.
        trial._suggest(name, distribution)
    return trial


def forget_unknown(trial: Any, name: str, values: Container[Any]) -> None:
    """Forget the value that a trial was queued with, if it is none of `values`, and warn; it is then drawn."""
    queued = trial._fixed_params
    if name in queued and queued[name] not in values:
        found = queued.pop(name)
        warnings.warn(
            f"trial {trial.number} was queued with {name}={str(found)[:100]}, which this sweep does not have; the "
            "value is drawn instead.",
            stacklevel=2,
        )


class _Values:
    """The values of a distribution."""

    def __init__(self, distribution: Any) -> None:
        self._distribution = distribution

    def __contains__(self, value: Any) -> bool:
        try:
            return bool(self._distribution._contains(self._distribution.to_internal_repr(value)))
        except (ValueError, TypeError):
            return False
