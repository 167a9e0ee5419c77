"""Does the accuracy of a model with the weights of a shared space say how good it is once it is trained alone?

    python -m benchmarks.exploration.inherited_accuracy

The space of explore_mnasnet, trained as one network by uniform paths. For models drawn at random: validation accuracy
with the weights that they inherit, running statistics taken anew; test accuracy of the same models trained from scratch
as the recipe says, mean over seeds; and, beside it, validation accuracy with the weights of a shared space that was not
trained. Spearman's correlation of the ranks, with a bootstrap interval of 95 % over the models.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata

import mlotool
from benchmarks.harness import record
from mlotool.config import build_module, compose

RECIPE = "explore_mnasnet"
SHARED = (
    "+problems.classifier.module.shared=true",
    "+problems.classifier.module.paths={_target_: mlotool.spaces.UniformPaths}",
)
QUIET = ("runner.report=false", "runner.progress_bar=false", "logger.mode=disabled")
NUM_DRAWS, LEVEL = 2_000, 0.95


class RankCorrelation(NamedTuple):
    """Spearman's correlation of ranks.

    Args:
        value: from -1 to 1; NaN where one figure is the same everywhere.
        low, high: the ends of its bootstrap interval of 95 %.
        num_pairs: of how many pairs.
    """

    value: float
    low: float
    high: float
    num_pairs: int


def rank_correlation(pairs: Sequence[tuple[float, float]], seed: int = 0) -> RankCorrelation:
    """Return Spearman's correlation of pairs, with an interval.

        rho = correlation of rank(a_i) and rank(b_i);   ties have the mean of their ranks

    The interval is between percentiles of the correlations of samples of the pairs, drawn with replacement; a sample in
    which one figure is the same everywhere has none, and is left out.

    Args:
        pairs: finite numbers.
        seed: of the samples.

    Source: Spearman 1904; Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 13.3.

    Example:
        >>> rank_correlation([(0.1, 0.5), (0.2, 0.6), (0.3, 0.9)]).value
        1.0
    """
    values = np.asarray(pairs, dtype=float).reshape(-1, 2)
    if len(values) < 2:
        return RankCorrelation(np.nan, np.nan, np.nan, len(values))
    chosen = np.random.default_rng(seed).integers(len(values), size=(NUM_DRAWS, len(values)))
    ranks = rankdata(np.concatenate([values[None], values[chosen]]), axis=1)
    ranks -= ranks.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        own, *drawn = (ranks.prod(axis=2).sum(axis=1) / np.sqrt((ranks**2).sum(axis=1).prod(axis=1))).round(12)
    low, high = (
        np.quantile(np.array(drawn)[~np.isnan(drawn)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if own == own else (own, own)
    )
    return RankCorrelation(float(own), float(low), float(high), len(values))


def run(folder: Path, *words: str) -> dict[str, float]:
    """Return the last metrics of a run."""
    return mlotool.run(compose(RECIPE, [*QUIET, *words]), output_dir=folder).metrics


def drawn(count: int, seed: int) -> list[dict[str, Any]]:
    """Return different paths, drawn uniformly."""
    table = build_module(compose(RECIPE, list(SHARED)), "classifier").table
    generator, found = random.Random(seed), list[dict[str, Any]]()
    while len(found) < count:
        path = {each.name: generator.choice(each.candidates) for each in table}
        if path not in found:
            found.append(path)
    return found


def measured(folder: Path, path: dict[str, Any], name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a model's accuracies."""
    words = [f"decisions.{key}={value}" for key, value in path.items()]
    row: dict[str, Any] = {"path": path}
    for source in ("trained", "untrained"):
        own = [f"inherit={folder / source}", "runner.max_ticks=0", f"evaluate.recalibrate={arguments.recalibrate}"]
        row[source] = run(folder / f"{name}_{source}", *words, *own)["val/accuracy"]
    alone = [run(folder / f"{name}_{seed}", *words, f"seed={seed}") for seed in range(arguments.seeds)]
    return {**row, "retrained": fmean(each["test/accuracy"] for each in alone)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3, help="runs from scratch of each model")
    parser.add_argument("--ticks", type=int, default=1500, help="of the shared space")
    parser.add_argument("--recalibrate", type=int, default=6, help="batches of 50: all of the training split")
    parser.add_argument("--output", type=Path, help="JSON; default: benchmarks/results/exploration_inherited.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    content = {**record.surroundings(), "paths": arguments.paths, "seeds": arguments.seeds, "ticks": arguments.ticks}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.process_time()
        for source, ticks in {"trained": arguments.ticks, "untrained": 0}.items():
            run(folder / source, *SHARED, f"runner.max_ticks={ticks}", f"evaluate.splits={{val: {max(ticks, 1)}}}")
        content["shared_cpu_s"] = time.process_time() - began
        for number, path in enumerate(drawn(arguments.paths, 0)):
            rows.append(measured(folder, path, str(number), arguments))
            shown = ", ".join(f"{key} {value:.3f}" for key, value in rows[-1].items() if key != "path")
            print(f"{number}: {shown}", flush=True)
    for source in ("trained", "untrained"):
        found = rank_correlation([(row[source], row["retrained"]) for row in rows])
        content[source] = {"spearman": found.value, "interval": [found.low, found.high]}
        print(f"weights of a {source} space: {found.value:.2f} [{found.low:.2f}, {found.high:.2f}]")
    print(f"written to {record.write('exploration_inherited', {**content, 'rows': rows}, arguments.output)}")


if __name__ == "__main__":
    main()
