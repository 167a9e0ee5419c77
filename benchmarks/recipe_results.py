"""What a recipe reaches over several seeds, beside a baseline: the figures of the recipes' headers.

    python -m benchmarks.recipe_results data=digits_noisy --recipe mwn --baseline plain \
        --baseline-only problems.classifier.optimizer.lr=0.03 --seeds 0 1 2 3 4 --jobs 2

Each seed draws data, corruption and initial parameters anew. Values are means with standard errors of the mean; the
last-tick figures come from last.ckpt, the others from the best checkpoint by the objective on `val`.
"""

import argparse
import json
import math
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import mlotool
from benchmarks.harness import record
from mlotool.runner import evaluate


def main() -> None:
    options = _options()
    rivals = {options.recipe: (options.recipe, options.recipe_only)}
    if options.baseline:
        # A recipe may be its own baseline, with other settings.
        label = options.baseline if options.baseline != options.recipe else f"{options.recipe} (baseline)"
        rivals[label] = (options.baseline, options.baseline_only)
    results: dict[str, dict[str, list[float]]] = {name: {} for name in rivals}
    for name, (recipe, own) in rivals.items():
        jobs = [(recipe, [*options.overrides, *own, f"seed={seed}"]) for seed in options.seeds]
        # Processes of its own for each recipe: peak memory is that of a process.
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            for (_, overrides), figures in zip(jobs, pool.map(_figures, *zip(*jobs, strict=True)), strict=True):
                for key, value in figures.items():
                    results[name].setdefault(key, []).append(value)
                print(name, overrides[-1], {key: round(value, 4) for key, value in figures.items()}, flush=True)
    summary = {name: {key: _summary(values) for key, values in figures.items()} for name, figures in results.items()}
    for name, figures in summary.items():
        for key, value in figures.items():
            print(f"{name:24} {key:32} {value['mean']:.4f} +- {value['standard_error']:.4f}")
    only = {name: own for name, (_, own) in rivals.items()}
    content = {"seeds": options.seeds, "overrides": options.overrides, "only": only, "values": results}
    content |= {"summary": summary, **record.surroundings()}
    path = record.write(f"recipe_{options.recipe}{options.tag}", content)
    print(path)


def _figures(recipe: str, overrides: list[str]) -> dict[str, float]:
    config = mlotool.compose(recipe, [*overrides, "logger=csv", "runner.progress_bar=false", "runner.num_threads=1"])
    with tempfile.TemporaryDirectory() as folder:
        result = mlotool.run(config, output_dir=Path(folder) / "run")
        split = "test"
        figures = {key: value for key, value in result.metrics.items() if key.startswith((split, "val/"))}
        analyses = set(config.analyses or {})
        figures.update({key: value for key, value in result.metrics.items() if key.split("/")[0] in analyses})
        if config.evaluate is not None:
            figures.update({f"last {key}": value for key, value in evaluate(result.output_dir, split, "last").items()})
        figures["training_s"] = _training_seconds(result.output_dir)
        figures["peak_rss_mb"] = record.peak_memory()
    return figures


def _training_seconds(run_dir: Path) -> float:
    return float(json.loads((run_dir / "summary.json").read_text())["training_s"])


def _summary(values: list[float]) -> dict[str, Any]:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"mean": mean(values), "standard_error": error, "num_seeds": len(values)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--baseline")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--recipe-only", nargs="*", default=[], help="overrides of the recipe alone")
    parser.add_argument("--baseline-only", nargs="*", default=[], help="overrides of the baseline alone")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--tag", default="", help="appended to the result file's name")
    parser.add_argument("overrides", nargs="*", help="overrides of both")
    return parser.parse_args()


if __name__ == "__main__":
    main()
