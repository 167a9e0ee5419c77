"""Accuracies in Markdown: means and standard errors over seeds, and differences to the baseline."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.layerparallel.accuracy_rows import AUGMENTED, BACKPROPAGATION, LONG_SUFFIX

HEADS = ("", "test accuracy, %", "less than backpropagation", "by seed")


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return a line for each row.

    Args:
        runs: each has `row`, `seed` and `accuracy`, which is None where it has diverged.
    """
    by_row: dict[str, dict[int, float | None]] = {}
    for run in runs:
        by_row.setdefault(run["row"], {})[run["seed"]] = run["accuracy"]
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for name, found in by_row.items():
        cells = [name, _mean(list(found.values())), _difference(found, by_row.get(baseline_of(name), {}))]
        cells.append(", ".join("diverged" if each is None else f"{each:.1f}" for each in found.values()))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def baseline_of(name: str) -> str:
    """Return the row of backpropagation with the same augmentation and length.

    Example:
        >>> baseline_of("AuxNet, augmented, K=2")
        'backpropagation, augmented'
    """
    times = LONG_SUFFIX if name.endswith(LONG_SUFFIX) else ""
    return f"{BACKPROPAGATION}{AUGMENTED if AUGMENTED in name else ''}{times}"


def _mean(values: Sequence[float | None]) -> str:
    finite = [each for each in values if each is not None]
    if len(finite) < len(values):
        return f"{len(values) - len(finite)} of {len(values)} diverged"
    error = f" +- {stdev(finite) / len(finite) ** 0.5:.2f}" if len(finite) > 1 else ""
    return f"{mean(finite):.2f}{error}"


def _difference(found: dict[int, float | None], baseline: dict[int, float | None]) -> str:
    # Seed by seed: another seed is another draw of the data.
    pairs = [(baseline[seed], each) for seed, each in found.items() if seed in baseline]
    return _mean([None if base is None or each is None else base - each for base, each in pairs]) if pairs else ""
