"""Whether settings, optimizer and hypergradient of a problem go together: the table's rows as messages."""

from collections.abc import Iterator

from mlotool.core.errors import ConfigError
from mlotool.problem.compatibility_case import Case
from mlotool.problem.compatibility_features import FEATURES
from mlotool.problem.compatibility_table import ROWS, Row


def check(case: Case) -> None:
    """Refuse what does not go together.

    Args:
        case: the problem, with what it is combined with.

    Raises:
        ConfigError: with the first row of the table that holds.
    """
    for row in broken(case):
        if row.is_refused:
            raise ConfigError(message(row, case))


def broken(case: Case) -> Iterator[Row]:
    """Yield the rows that hold for a case."""
    held = {name: each.holds(case) for name, each in FEATURES.items()}
    return (row for row in ROWS if held[row.first] and held[row.second])


def reason(row: Row, case: Case) -> str:
    """Return why a row that holds for a case does."""
    return row.reason.format(**_words(case))


def message(row: Row, case: Case) -> str:
    """Return what to tell of a row that holds: what was found, what was expected, what to do."""
    words = _words(case)
    key = f"problems.{case.name}.{row.key}"
    advice = row.advice.format(**words) or f"Correct {key}."
    expected = row.expected.format(**words)
    return f"{key}: found {_found(row.key, case)}; expected {expected}, since {reason(row, case)}. {advice}"


def _words(case: Case) -> dict[str, str]:
    return {
        "name": case.name,
        "solution": case.solution or case.name,
        "reader": case.reader,
        "read": case.read,
        "algorithm": type(case.algorithm).__name__,
    }


def _found(key: str, case: Case) -> str:
    owners = {
        "hypergradient": case.algorithm,
        "hypergradient.solver": getattr(case.algorithm, "solver", None),
        "optimizer": case.optimizer,
        "scheduler": case.scheduler,
    }
    if key in owners:
        return type(owners[key]).__name__
    if key == "hypergradient.product":
        return "finite_difference"
    if key == "parallel.processes":
        return "true"
    if key == "same_batch_as":
        return "a problem"
    if key == "module":
        return type(case.module).__name__
    if key == "module.statistics":
        return "path"
    value = getattr(case.settings, key)
    return "true" if value is True else repr([*value] if isinstance(value, tuple) else value)
