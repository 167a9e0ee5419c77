"""What one-shot searches find: beside random search with as many trials, and in the same time.

    python -m benchmarks.exploration.one_shot
    python -m benchmarks.exploration.one_shot --ways spos random --seeds 3 --jobs 2

Each way ends with `explore_residual decisions=<what it has found>`, a training from scratch, of which the test split
counts; the search does not see it. Time is the CPU time of all commands of a way, with their imports. Random search
trains 40 models and takes the one with the best validation accuracy; "in the same time" it is the best of as many as
the other way's CPU time pays for. The base is the model of the first candidates. Seeds begin at 200: settings were
chosen with others. Rows that the result file has already are not measured again.
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
FOUND = ["run", "+recipe=explore_residual", "decisions=outputs/search", "hydra.run.dir=outputs/found"]
"""What trains the model that a search has found."""


def measured(way: str, seed: int) -> dict[str, Any]:
    """Return the CPU seconds of a way, and the validation and test accuracy of its model; of random search, of all."""
    with tempfile.TemporaryDirectory() as folder:
        taken = 0.0
        for words in [*WAYS[way], *([] if way in ("base", "random") else [FOUND])]:
            sampler = [f"sweep.seed={seed}"] if "-m" in words else []
            every = [*words, *sampler, f"seed={seed}", "logger=csv", "runner.report=false"]
            taken += whole_command(every, Path(folder))["cpu_s"]
        outputs = Path(folder, "outputs")
        if way == "random":
            jobs = sorted(outputs.glob("search/*/summary.json"), key=lambda each: int(each.parent.name))
        else:
            jobs = [outputs / "found" / "summary.json"]
        metrics = [json.loads(each.read_text())["metrics"] for each in jobs]
    return {
        "way": way,
        "seed": seed,
        "cpu_s": taken,
        "val": [each["val/accuracy"] for each in metrics],
        "test": [each["test/accuracy"] for each in metrics],
    }


def best_of(row: dict[str, Any], count: int) -> float:
    """Return the test accuracy of the model with the best validation accuracy among the first `count`."""
    number = max(range(min(count, len(row["val"]))), key=lambda each: row["val"][each])
    return row["test"][number]


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
