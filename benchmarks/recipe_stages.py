"""Recipes whose result only shows in a second training, over several seeds: the figures of their headers.

    python -m benchmarks.recipe_stages darts --seeds 0 1 2 3 4
    python -m benchmarks.recipe_stages data_poisoning --seeds 0 1 2 3 4
    python -m benchmarks.recipe_stages lm_data_mixture --seeds 0 1 2 3 4

darts: the architecture that a search finds, and a random one, are trained from scratch by darts_evaluate.
data_poisoning: a classifier with another start is trained from scratch on data with the learned perturbations, with
random ones of full size (each entry at the bound) and without any.
lm_data_mixture: a language model is trained from scratch on the shares that were learned, on equal ones, on equal ones
for the time of both trainings together, and on the one domain that one would choose by hand.
Each seed draws data and initial parameters anew.
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlotool
from benchmarks.harness import record
from benchmarks.recipe_results import _summary, _training_seconds
from mlotool import Schedule
from mlotool.config import build
from mlotool.runner.evaluation import Evaluator

Figures = dict[str, dict[str, float]]
DOMAINS = ("docstrings", "code", "tables", "scrambled")
OPERATIONS = (
    *("skip_connect", "max_pool_3x3", "avg_pool_3x3"),
    *("sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5"),
)
LM_TICKS = 1000
LM_SEARCH_TICKS = 430
"""Ticks of plain training that take as long as the search: 300, each of which costs 1.42 of a plain one."""
QUIET = ("logger=csv", "runner.progress_bar=false", "runner.num_threads=1")


def main() -> None:
    """Measure one recipe and write results/recipe_<name>.json."""
    stages: dict[str, Callable[[int, Sequence[str]], Figures]] = {
        "darts": _darts,
        "data_poisoning": _data_poisoning,
        "lm_data_mixture": _lm_data_mixture,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=stages)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tag", default="", help="appended to the result file's name")
    parser.add_argument("--overrides", nargs="*", default=[], help="of the first stage")
    options = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    for seed in options.seeds:
        for rival, figures in stages[options.recipe](seed, options.overrides).items():
            for key, value in figures.items():
                results.setdefault(rival, {}).setdefault(key, []).append(value)
            print(seed, rival, {key: round(value, 4) for key, value in figures.items()}, flush=True)
        # After each seed: what is measured is not lost when the rest is cut short.
        summary = {name: {key: _summary(values) for key, values in each.items()} for name, each in results.items()}
        done = options.seeds[: options.seeds.index(seed) + 1]
        content = {"seeds": done, "overrides": options.overrides, "values": results, "summary": summary}
        path = record.write(f"recipe_{options.recipe}{options.tag}", content | record.surroundings())
    for name, each in summary.items():
        for key, value in each.items():
            print(f"{name:24} {key:32} {value['mean']:.4f} +- {value['standard_error']:.4f}")
    print(path)


def _darts(seed: int, overrides: Sequence[str]) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        search, run_dir = _run("darts", [*overrides, f"seed={seed}"], Path(folder) / "search")
        lines = (run_dir / "artifacts" / "search_decisions.txt").read_text().split("\n")
        decisions = dict(line.split(": ") for line in lines if line)
        found = {"search": search}
        for name, each in {"found": decisions, "random": _random_cells(seed)}.items():
            own = [f"+decisions.{decision}={value}" for decision, value in each.items()]
            found[name], _ = _run("darts_evaluate", [*own, f"seed={seed}"], Path(folder) / name)
    print(seed, {name: value for name, value in decisions.items() if value != "none"}, flush=True)
    return found


def _random_cells(seed: int) -> dict[str, str]:
    """Draw two edges for each node of both kinds of cells, each with any operation but `none`."""
    draw = random.Random(seed)
    found: dict[str, str] = {}
    for kind in ("normal", "reduction"):
        edge = 0
        for num_incoming in range(2, 6):
            kept = draw.sample(range(num_incoming), 2)
            for source in range(num_incoming):
                found[f"{kind}_{edge}"] = draw.choice(OPERATIONS) if source in kept else "none"
                edge += 1
    return found


def _data_poisoning(seed: int, overrides: Sequence[str]) -> Figures:
    overrides = [*overrides, f"seed={seed}"]
    with tempfile.TemporaryDirectory() as folder:
        crafting, run_dir = _run("data_poisoning", overrides, Path(folder) / "run")
        poison = mlotool.load(run_dir, "poison", checkpoint="last")
    # Never steps: a classifier that trains alone.
    alone = [*overrides, f"seed={seed + 1000}", f"data.seed={seed}", "problems.classifier.unroll_steps=1000000"]
    found = {"crafting": crafting, "learned": _retrained(alone, poison.state_dict())}
    found["random"] = _retrained([*alone, "problems.poison.module.start=random"])
    found["none"] = _retrained(alone)
    return found


def _lm_data_mixture(seed: int, overrides: Sequence[str]) -> Figures:
    with tempfile.TemporaryDirectory() as folder:

        def train(name: str, shares: Sequence[float], num_ticks: int) -> dict[str, float]:
            own = [f"data.shares.train.{domain}={share}" for domain, share in zip(DOMAINS, shares, strict=True)]
            ticks = [f"runner.max_ticks={num_ticks}", "evaluate.splits.val=500"]
            found, _ = _run("lm_plain", [f"seed={seed}", "data=python_text_mixture", *own, *ticks], Path(folder) / name)
            return found

        search, _ = _run("lm_data_mixture", [*overrides, f"seed={seed}"], Path(folder) / "search")
        learned = [search[f"shares/share_{number}"] for number in range(len(DOMAINS))]
        return {
            "search": search,
            "learned": train("learned", learned, LM_TICKS),
            "equal": train("equal", [1, 1, 1, 1], LM_TICKS),
            "equal_longer": train("equal_longer", [1, 1, 1, 1], LM_TICKS + LM_SEARCH_TICKS),
            "by_hand": train("by_hand", [1, 0, 0, 0], LM_TICKS),
        }


def _retrained(overrides: Sequence[str], poison: Any = None) -> dict[str, float]:
    config = mlotool.compose("data_poisoning", [*overrides, *QUIET])
    built = build(config)
    if poison is not None:
        built.program.problems["poison"].module.load_state_dict(poison)
    schedule = Schedule(built.program)
    for _ in range(config.runner.max_ticks):
        schedule.tick()
    classifier = built.program.problems["classifier"].module
    return Evaluator(classifier, built.data, ["accuracy"], 500).evaluate("test")


def _run(recipe: str, overrides: Sequence[str], folder: Path) -> tuple[dict[str, float], Path]:
    result = mlotool.run(mlotool.compose(recipe, [*overrides, *QUIET]), output_dir=folder)
    wanted = ("val/", "test/", "search/", "shares/")
    figures = {key: value for key, value in result.metrics.items() if key.startswith(wanted)}
    figures["training_s"] = _training_seconds(result.output_dir)
    figures["peak_rss_mb"] = record.peak_memory()
    return figures, result.output_dir


if __name__ == "__main__":
    main()
