"""How often pruners end the trial that would have been the best, and how many ticks they save.

    python -m benchmarks.exploration.pruners
    python -m benchmarks.exploration.pruners --curves DIR

32 random settings of each recipe are trained to their end, as one program. Then searches of 8 and of 20 of them, in 60
random orders, are replayed with each pruner: it sees the values of the trials so far. `best_pruned` is the share of
searches in which no trial with the best final value was left; `saved` the share of ticks that were not trained;
`regret` the mean loss of the objective. DIR keeps the sweeps: those that it has already are not trained again.
"""

import argparse
import math
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna

from benchmarks.harness import record
from benchmarks.harness.whole_command import whole_command
from mlotool.folders.run_folder import RunFolder

_LR = "problems.{}.optimizer.lr=tag(log,interval({},{}))".format
_MOMENTUM = "problems.classifier.optimizer.momentum=interval(0,0.95)"
RECIPES: dict[str, list[str]] = {
    "plain": ["runner.max_ticks=1000", _LR("classifier", "1e-3", 1), _MOMENTUM,
              "problems.classifier.optimizer.weight_decay=tag(log,interval(1e-5,1e-2))"],
    "learned_lr": [_LR("rate", "1e-2", 1), _MOMENTUM],
    "mwn": ["runner.max_ticks=1000", _LR("classifier", "1e-3", "1e-1"), _LR("reweight", "1e-4", "1e-1")],
    "data_cleaning": ["runner.max_ticks=1000", _LR("classifier", "1e-3", "1e-1"), _LR("weights", "1e-3", "1e-1")],
    "mwn_text": [_LR("classifier", "1e-4", "1e-2"), _LR("reweight", "1e-4", "1e-1")],
    "logistic_hpo": ["runner.max_ticks=5000", "evaluate.splits.val=500", _LR("classifier", "1e-3", "1e-1"),
                     _LR("decay", "5e-3", 0.5)],
}  # fmt: skip
NUM_TRIALS, NUM_SEARCHES, SIZES = 32, 60, (8, 20)
Curve = dict[int, float]


def curves(recipe: str, folder: Path) -> list[Curve]:
    """Return the validation accuracy of each trial by tick."""
    sweep = folder / recipe
    if not sweep.is_dir():
        words = [f"+recipe={recipe}", "sweep=optuna", "sweep.sampler=random", "sweep.recipe_first=false",
                 f"sweep.num_trials={NUM_TRIALS}", f"sweep.fuse={NUM_TRIALS}", "logger=csv", "runner.report=false",
                 "runner.checkpoint=false", f"hydra.sweep.dir={sweep}", *RECIPES[recipe]]  # fmt: skip
        whole_command(["run", "-m", *words], folder)
    runs = [RunFolder(sweep / str(number)) for number in range(NUM_TRIALS)]
    finished = [run for run in runs if run.summary().get("status") == "finished"]
    points = [run.metrics()[0]["val/accuracy"] for run in finished]
    return [{int(tick): value for tick, value in sorted(own.items())} for own in points]


def pruners(last_tick: int, every: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield pruners by what they are; those of a part of a run wait until the next evaluation after it."""
    kinds = optuna.pruners

    def part(number: float) -> int:
        return every * math.ceil(last_tick / number / every)

    yield "median, from the first evaluation on (Optuna's)", lambda: kinds.MedianPruner()
    yield "median, from 1/4 of the run on", lambda: kinds.MedianPruner(n_warmup_steps=part(4))
    yield "median, from 1/3 of the run on (ours)", lambda: kinds.MedianPruner(n_warmup_steps=part(3))
    yield "median, from 1/2 of the run on", lambda: kinds.MedianPruner(n_warmup_steps=part(2))
    yield "the worst quarter, from 1/3 of the run on", lambda: kinds.PercentilePruner(75.0, n_warmup_steps=part(3))
    yield "successive halving, auto (Optuna's)", lambda: kinds.SuccessiveHalvingPruner()
    yield "successive halving by 2, from 1/4 on", lambda: kinds.SuccessiveHalvingPruner(part(4), 2)
    yield "successive halving by 3, from 1/9 on (ours)", lambda: kinds.SuccessiveHalvingPruner(part(9), 3)
    yield "successive halving by 4, from 1/16 on", lambda: kinds.SuccessiveHalvingPruner(part(16), 4)


def replay(found: list[Curve], make: Callable[[], Any], size: int) -> dict[str, float]:
    """Return what a pruner does to searches of some trials."""
    generator, lost, regrets, ticks, total = random.Random(0), 0, [], 0, 0
    for _ in range(NUM_SEARCHES):
        study = optuna.create_study(direction="maximize", pruner=make())
        chosen = generator.sample(found, size)
        left = [-math.inf]
        for curve in chosen:
            trial, last = study.ask(), max(curve)
            for tick, value in curve.items():
                trial.report(value, tick)
                if tick < last and trial.should_prune():
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                    break
            else:
                left.append(max(curve.values()))
                study.tell(trial, left[-1])
            ticks, total = ticks + tick, total + last
        best = max(max(curve.values()) for curve in chosen)
        lost += max(left) < best
        regrets.append(best - max(left))
    return {"best_pruned": lost / NUM_SEARCHES, "saved": 1 - ticks / total, "regret": statistics.mean(regrets)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--curves", type=Path, help="keeps the sweeps; default: a temporary folder")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/exploration_pruners.json")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    where, rows = record.surroundings(("torch", "optuna")), []
    with tempfile.TemporaryDirectory() as temporary:
        for recipe in arguments.recipes:
            found = curves(recipe, (arguments.curves or Path(temporary)).absolute())
            last, every = max(map(max, found)), min(map(min, found))
            for size in SIZES:
                for name, make in pruners(last, every):
                    rows.append({"recipe": recipe, "trials": size, "pruner": name, **replay(found, make, size)})
                    values = ", ".join(f"{key} {rows[-1][key]:.4f}" for key in ("best_pruned", "saved", "regret"))
                    print(f"{recipe}, {size} trials, {name}: {values}", flush=True)
    mean = [
        {"pruner": name, "trials": size, **{
            key: statistics.mean(row[key] for row in rows if (row["pruner"], row["trials"]) == (name, size))
            for key in ("best_pruned", "saved", "regret")}}
        for size in SIZES for name in dict.fromkeys(row["pruner"] for row in rows)
    ]  # fmt: skip
    path = record.write("exploration_pruners", {**where, "mean": mean, "rows": rows}, arguments.output)
    for row in mean:
        values = f"{row['best_pruned']:.2f} | {row['saved']:.2f} | {row['regret']:.4f}"
        print(f"| {row['pruner']} | {row['trials']} | {values} |")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
