"""What the samplers of sweeps find in tables of 360 points, and how long they take for a draw after 1,000 trials.

    python -m benchmarks.exploration.samplers

A table has five decisions of 3, 4, 5, 3 and 2 choices; its values, from 0 to 1, are sums of normal effects of each
decision (of variance 1) and of each pair of them, without noise. Regret is 1 less the best value of 60 trials, here the
mean over `--seeds` of the sampler. A draw is that of 20 parameters, 15 of them decisions of 5 choices, of a study in
memory: CPU time.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna

from benchmarks.exploration.tables import TABLES, Table, hypervolume, regret
from benchmarks.harness import record
from mlotool.sweep.study_options import make_sampler

SAMPLERS: dict[str, dict[str, Any]] = {
    "random": {},
    "tpe": {"multivariate": True, "group": True},
    "evolution": {},
    "reinforce": {},
    "predictor": {},
}
NUM_TRIALS, NUM_BEFORE, NUM_DRAWS = 60, 1000, 20


def regrets(name: str, num_seeds: int) -> list[float]:
    """Return the mean regret of a sampler in each table."""
    return [
        statistics.mean(
            regret(Table(*each), make_sampler(name, SAMPLERS[name], seed), NUM_TRIALS) for seed in range(num_seeds)
        )
        for each in TABLES
    ]


def volumes(name: str, options: dict[str, Any], num_seeds: int) -> float:
    """Return the mean hypervolume of a sampler that searches the first two tables at once."""
    first, second = Table(*TABLES[0]), Table(*TABLES[1])
    found = []
    for seed in range(num_seeds):
        study = optuna.create_study(directions=["maximize", "maximize"], sampler=make_sampler(name, options, seed))
        study.optimize(lambda trial: (first.ask(trial), second.ask(trial)), n_trials=NUM_TRIALS)
        found.append(hypervolume([(trial.values[0], trial.values[1]) for trial in study.trials]))
    return statistics.mean(found)


def large_space(trial: optuna.Trial) -> float:
    """Return a value of a space of 20 parameters."""
    value = sum("abcde".index(trial.suggest_categorical(f"decision_{each}", list("abcde"))) for each in range(15))
    value += sum(trial.suggest_int(f"depth_{each}", 1, 6) for each in range(3))
    return value + trial.suggest_float("rate", 1e-4, 1e-1, log=True) + trial.suggest_float("dropout", 0.0, 1.0)


def seconds(make: Callable[[], Any]) -> tuple[float, float]:
    """Return the time of the first draw in a new process, and the median of those after it."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(large_space, n_trials=NUM_BEFORE)
    study.sampler = make()
    times = []
    for _ in range(1 + NUM_DRAWS):
        start = time.process_time()
        trial = study.ask()
        value = large_space(trial)
        times.append(time.process_time() - start)
        study.tell(trial, value)
    return times[0], statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/exploration_samplers.json")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    where = record.surroundings(("optuna", "numpy"))
    names = " | ".join(f"seed {seed}, pairs {interaction:g}" for seed, interaction in TABLES)
    print(f"| regret | {names} | mean, of random's | ms of a draw | of the first |\n|{'---|' * (len(TABLES) + 4)}")
    rows: dict[str, dict[str, Any]] = {}
    for name, options in SAMPLERS.items():
        found = regrets(name, arguments.seeds)
        first, later = seconds(lambda: make_sampler(name, options, 0))  # noqa: B023
        random = statistics.mean(rows["random"]["regrets"]) if rows else statistics.mean(found)
        ratio = statistics.mean(found) / random
        rows[name] = {"regrets": found, "ratio": ratio, "draw_ms": 1e3 * later, "first_draw_ms": 1e3 * first}
        cells = " | ".join(f"{each:.4f}" for each in found)
        print(f"| {name} | {cells} | {ratio:.2f} | {1e3 * later:.0f} | {1e3 * first:.0f} |", flush=True)
    fronts = {
        "random": volumes("random", {}, arguments.seeds),
        "nsga2": volumes("nsga2", {"population_size": 12}, arguments.seeds),
    }
    print("\nhypervolume of two objectives: " + ", ".join(f"{name} {value:.4f}" for name, value in fronts.items()))
    content = {**where, "num_seeds": arguments.seeds, "num_trials": NUM_TRIALS, "tables": TABLES, "options": SAMPLERS}
    path = record.write("exploration_samplers", {**content, "rows": rows, "hypervolumes": fronts}, arguments.output)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
