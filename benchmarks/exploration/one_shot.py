"""What one-shot searches find: beside random search with as many trials, and in the same time.

    python -m benchmarks.exploration.one_shot
    python -m benchmarks.exploration.one_shot --ways spos random --seeds 3 --jobs 2

Each way ends with `explore_residual decisions=<what it has found>`, a training from scratch with a seed that no search
has had, of which the test split counts; the search does not see it. Random search trains 40 models and takes the one
with the best validation accuracy, which is trained once more like the others' finds: its own weights were selected, by
chance of their seed too. "In the same time" it is the best of as many as the other way's CPU time pays for. The base is
the model of the first candidates. Time is the CPU time of all commands of a way, with their imports. Seeds begin at
200: settings were chosen with others. Rows that the result file has already are not measured again.
"""

import argparse
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.harness import record
from benchmarks.harness.whole_command import whole_command

FIRST_SEED, NUM_TRIALS = 200, 40
SEARCH = [f"sweep.num_trials={NUM_TRIALS}", "hydra.sweep.dir=outputs/search"]
WAYS: dict[str, list[list[str]]] = {
    "base": [["run", "+recipe=explore_residual", "hydra.run.dir=outputs/found"]],
    "random": [["run", "-m", "+recipe=explore_residual", "sweep.sampler=random", *SEARCH]],
    "spos": [
        ["run", "+recipe=explore_spos", "hydra.run.dir=outputs/shared"],
        ["run", "-m", "+recipe=explore_spos_search", "inherit=outputs/shared", *SEARCH],
    ],
    **{
        name: [["run", f"+recipe=explore_{name}", "hydra.run.dir=outputs/search"]]
        for name in ("darts", "proxyless", "enas")
    },
}
NEW_SEED = 1000
"""Added to a search's seed for the training of what it has found."""


def measured(way: str, seed: int) -> dict[str, Any]:
    """Return the CPU seconds of a way, and the validation and test accuracy of its model.

    Of random search, the validation accuracies of all models, and the test accuracies of those that were the best so
    far when they were trained, each trained once more.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, taken = Path(name), 0.0
        for words in WAYS[way]:
            sampler = [f"sweep.seed={seed}"] if "-m" in words else []
            taken += command(folder, *words, *sampler, f"seed={seed + NEW_SEED if way == 'base' else seed}")
        search = folder / "outputs" / "search"
        if way == "random":
            jobs = sorted(search.glob("*/summary.json"), key=lambda each: int(each.parent.name))
            val = [metrics(each.parent)["val/accuracy"] for each in jobs]
            firsts = [number for number, value in enumerate(val) if value > max(val[:number], default=-1.0)]
            finds = {number: jobs[number].parent for number in firsts}
        else:
            val, finds = [], {} if way == "base" else {0: search}
        trained = {0: (0.0, metrics(folder / "outputs" / "found"))} if way == "base" else {}
        for number, found in finds.items():
            trained[number] = retrained(folder, found, number, seed + NEW_SEED)
    # Random search trains one of its finds in the end.
    taken += max(each[0] for each in trained.values())
    test = {str(number): each["test/accuracy"] for number, (_, each) in trained.items()}
    return {"way": way, "seed": seed, "cpu_s": taken, "val": val, "test": test}


def retrained(folder: Path, found: Path, number: int, seed: int) -> tuple[float, dict[str, float]]:
    """Train what a search has found; return the CPU seconds and the metrics."""
    place = f"outputs/found_{number}"
    seconds = command(
        folder, "run", "+recipe=explore_residual", f"decisions={found}", f"hydra.run.dir={place}", f"seed={seed}"
    )
    return seconds, metrics(folder / place)


def command(folder: Path, *words: str) -> float:
    """Run a command; return its CPU seconds."""
    return float(whole_command([*words, "logger=csv", "runner.report=false"], folder)["cpu_s"])


def metrics(folder: Path) -> dict[str, float]:
    """Return the last metrics of a run."""
    found: dict[str, float] = json.loads((folder / "summary.json").read_text())["metrics"]
    return found


def best_of(row: dict[str, Any], count: int) -> float:
    """Return the test accuracy, trained once more, of what was best on the validation split among the first `count`."""
    number = max(range(min(count, len(row["val"]))), key=lambda each: row["val"][each], default=0)
    return float(row["test"][str(number)])


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each way, test accuracies beside random search: means over the seeds that both have."""
    by_seed = {(row["way"], row["seed"]): row for row in rows}
    found = []
    for way in dict.fromkeys(row["way"] for row in rows):
        pairs = [(row, by_seed["random", seed]) for (name, seed), row in by_seed.items() if name == way]
        own = [best_of(row, NUM_TRIALS) for row, _ in pairs]
        counts = [max(1, int(row["cpu_s"] / (other["cpu_s"] / NUM_TRIALS))) for row, other in pairs]
        trials = [best_of(other, NUM_TRIALS) for _, other in pairs]
        same_time = [best_of(other, count) for (_, other), count in zip(pairs, counts, strict=True)]
        found.append(
            {
                "way": way,
                "seeds": len(own),
                "test": _mean(own),
                "cpu_s": statistics.mean(row["cpu_s"] for row, _ in pairs),
                "random, 40 trials": _mean(trials),
                "ahead of it": _mean([a - b for a, b in zip(own, trials, strict=True)]),
                "random, same time": _mean(same_time),
                "trials in that time": statistics.mean(counts),
                "ahead of it in that time": _mean([a - b for a, b in zip(own, same_time, strict=True)]),
            }
        )
    return found


def _mean(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.4f} +- {error:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time, each with one thread")
    parser.add_argument("--output", type=Path, default=record.RESULTS / "exploration_one_shot.json")
    arguments = parser.parse_args()
    where = record.surroundings(("torch", "pytorch-lightning", "optuna"))
    rows = json.loads(arguments.output.read_text())["rows"] if arguments.output.is_file() else []
    done = {(row["way"], row["seed"]) for row in rows}
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    wanted = [(way, seed) for seed in seeds for way in arguments.ways if (way, seed) not in done]
    failed = False
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for job in as_completed([pool.submit(measured, *each) for each in wanted]):
            try:
                rows.append(job.result())
            except SystemExit as error:
                failed = True
                print(error, flush=True)
                continue
            row = rows[-1]
            print(f"{row['way']}, seed {row['seed']}: {best_of(row, NUM_TRIALS):.4f}, {row['cpu_s']:.0f} s", flush=True)
            record.write("exploration_one_shot", {**where, "rows": rows}, arguments.output)
    with_random = {row["seed"] for row in rows if row["way"] == "random"}
    found = summary([row for row in rows if row["seed"] in with_random])
    for each in found:
        print(", ".join(f"{key} {value}" for key, value in each.items()))
    record.write("exploration_one_shot", {**where, "summary": found, "rows": rows}, arguments.output)
    sys.exit(failed)


if __name__ == "__main__":
    main()
