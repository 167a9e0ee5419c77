"""What a search of each recipe's space finds: beside random search with as many trials, and beside the base model.

    python -m benchmarks.exploration.headers
    python -m benchmarks.exploration.headers --recipes explore_textnas --seeds 5 --jobs 2

Each seed is that of the runs and of the sampler. A search's result is that of the run with the best objective, on the
test split, which the search does not see. The base has the first candidates and the same seeds. Seeds begin at 200:
recipes were made with others. Rows that the result file has already are not measured again.
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


def score(recipe: str, way: str, seed: int) -> dict[str, Any]:
    """Return the objective and the test value of the best run of a search, or of the base."""
    words = [f"+recipe={recipe}", f"seed={seed}", "logger=csv", "runner.report=false"]
    search = ["-m", f"sweep.seed={seed}", *WAYS[way]] if way != "base" else []
    with tempfile.TemporaryDirectory() as folder:
        whole_command(["run", *search, *words], Path(folder))
        found = [json.loads(path.read_text()) for path in Path(folder).glob("outputs/**/summary.json")]
    finished = [each for each in found if each["status"] == "finished"]
    objective = finished[0]["objective"]
    best = (max if objective["mode"] == "max" else min)(finished, key=lambda each: each["objective"]["value"])
    key = "test/" + objective["key"].partition("/")[2]
    return {
        "recipe": recipe,
        "way": way,
        "seed": seed,
        "objective": best["objective"]["value"],
        key: best["metrics"][key],
    }


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
