"""What a search of each recipe's space finds: beside random search with as many trials, and beside the base model.

    python -m benchmarks.exploration.headers
    python -m benchmarks.exploration.headers --recipes explore_textnas --seeds 5 --jobs 2

Each seed is that of the runs and of the sampler. The choices of the run with the best objective are trained once more,
with a seed that no search has had, since the weights of that run were selected, by chance of their seed too. The result
is that training's, on the test split, which the search does not see. The base has the first candidates and the seed of
these trainings. Seeds begin at 200: recipes were made with others. Rows that the result file has already are not
measured again.
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

RECIPES = (
    "explore_mnasnet",
    "explore_nasnet",
    "explore_amoebanet",
    "explore_textnas",
    "explore_path_level",
    "explore_weight_agnostic",
    "explore_mwn",
)
WAYS: dict[str, list[str]] = {
    "search": [],
    "random": ["sweep.sampler=random", "sweep.sampler_options=null"],
    "base": [],
}
FIRST_SEED = 200
NEW_SEED = 1000
"""Added to a search's seed for the training of what it has found."""


def score(recipe: str, way: str, seed: int) -> dict[str, Any]:
    """Return the objective of the best run of a search, and the test value of its choices, trained once more."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), []
        if way != "base":
            trained(folder, recipe, seed, "-m", f"sweep.seed={seed}", *WAYS[way])
            runs = {path.parent: json.loads(path.read_text()) for path in folder.glob("outputs/**/summary.json")}
            finished = {path: each for path, each in runs.items() if each["status"] == "finished"}
            sign = -1 if next(iter(finished.values()))["objective"]["mode"] == "min" else 1
            best = max(finished, key=lambda path: sign * finished[path]["objective"]["value"])
            found = [f"decisions={best}"]
        trained(folder, recipe, seed + NEW_SEED, *found, "hydra.run.dir=again")
        again = json.loads((folder / "again" / "summary.json").read_text())
    key = "test/" + again["objective"]["key"].partition("/")[2]
    objective = (again if way == "base" else finished[best])["objective"]["value"]
    return {"recipe": recipe, "way": way, "seed": seed, "objective": objective, key: again["metrics"][key]}


def trained(folder: Path, recipe: str, seed: int, *words: str) -> None:
    """Run a recipe with a seed, or with `-m` a search of it."""
    whole_command(["run", f"+recipe={recipe}", f"seed={seed}", *words, "logger=csv", "runner.report=false"], folder)


def known(path: Path) -> list[dict[str, Any]]:
    """Return the rows that a call before has written."""
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def told(recipe: str, way: str, rows: list[dict[str, Any]]) -> str:
    """Return the line of a recipe's way: the mean of the test split over seeds, with its standard error."""
    own = [row for row in rows if (row["recipe"], row["way"]) == (recipe, way)]
    values = [value for row in own for key, value in row.items() if key.startswith("test/")]
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{recipe}, {way}: {statistics.mean(values):.4f} +- {error:.4f} ({len(values)} seeds)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="searches at a time, each with one thread")
    parser.add_argument("--output", type=Path, default=record.RESULTS / "exploration_headers.json")
    arguments = parser.parse_args()
    where, rows = record.surroundings(("torch", "pytorch-lightning", "optuna")), known(arguments.output)
    done = {(row["recipe"], row["way"], row["seed"]) for row in rows}
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    wanted = [(recipe, way, seed) for recipe in arguments.recipes for seed in seeds for way in WAYS]
    failed = False
    with ThreadPoolExecutor(arguments.jobs) as pool:
        jobs = [pool.submit(score, *each) for each in wanted if each not in done]
        for job in as_completed(jobs):
            try:
                rows.append(job.result())
            except SystemExit as error:
                failed = True
                print(error, flush=True)
                continue
            print(told(rows[-1]["recipe"], rows[-1]["way"], rows), flush=True)
            # Hours in all: what there is so far, and a second call goes on.
            record.write("exploration_headers", {**where, "rows": rows}, arguments.output)
    sys.exit(failed)


if __name__ == "__main__":
    main()
