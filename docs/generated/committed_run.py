"""Keep of runs and searches what the gallery shows: `python -m docs.generated.committed_run RUN_OR_SWEEP ..`.

It writes docs/runs/<recipe>/ of a run, and docs/runs/<recipe>/search/ of a sweep. Kept are the last metrics, how the
run was made, the model of a space with its decisions, and up to four figures: what was learned first, then the curves
of evaluation, then those of training.
"""

import csv
import json
import shutil
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parents[1] / "runs"
NUM_FIGURES = 4
_LAST = ("evaluation-", "training-", "loss-")
_OF_A_SEARCH = ("objective.svg", "parallel.svg")


def keep(folder: Path) -> Path:
    """Write what is kept of a run or of a sweep, and return where.

    Args:
        folder: a run's or a sweep's.
    """
    return keep_search(folder) if (folder / "sweep.csv").exists() else keep_run(folder)


def keep_run(run: Path) -> Path:
    """Write what is kept of a run, and return where."""
    origin, summary = _json(run / "provenance.json"), _json(run / "summary.json")
    folder = _emptied(RUNS / Path(origin["recipe_path"]).stem)
    metrics = {name: value for name, value in summary["metrics"].items() if not name.endswith(("/step", "/lr"))}
    made = {**_made(origin), "seconds": round(origin["duration_s"], 1), "metrics": metrics}
    _write(folder, made, chosen(sorted((run / "report").glob("*.svg"))), run)
    return folder


def keep_search(sweep: Path) -> Path:
    """Write what is kept of a search, and return where."""
    with (sweep / "sweep.csv").open(encoding="utf-8", newline="") as file:
        jobs = list(csv.DictReader(file))
    plan = _json(sweep / "plan.json")
    finished = [job for job in jobs if job["status"] == "finished"]
    best = (max if plan["mode"] == "max" else min)(finished, key=lambda job: float(job["value"]))
    run = sweep / best["job"]
    origin = _json(run / "provenance.json")
    decisions = {key.removeprefix("decisions."): value for key, value in best.items() if key.startswith("decisions.")}
    made = {
        **_made(origin),
        "seconds": _seconds(sweep, [job["job"] for job in jobs]),
        "jobs": dict(Counter(job["status"] for job in jobs)),
        "sampler": plan["search"]["sampler"],
        "objective": plan["objective"],
        "best": {"job": int(best["job"]), "value": float(best["value"]), "decisions": decisions},
        "test": {key: float(value) for key, value in best.items() if key.startswith("test/") and value},
    }
    folder = _emptied(RUNS / Path(origin["recipe_path"]).stem / "search")
    figures = [sweep / "report" / name for name in _OF_A_SEARCH]
    _write(folder, made, [figure for figure in figures if figure.exists()], run)
    return folder


def _made(origin: dict[str, Any]) -> dict[str, Any]:
    command = origin["command"].split("mlotool", 1)[-1].replace(" runner.progress_bar=false", "")
    return {
        "command": f"mlotool{command}",
        "commit": origin["git"].get("commit"),
        "versions": {name: origin["versions"][name] for name in ("mlotool", "torch", "pytorch-lightning")},
        "date": origin["finished"][:10],
        "seed": origin["seed"],
    }


def _seconds(sweep: Path, jobs: list[str]) -> float:
    """Return the time from the first job's start to the last one's end."""
    origins = [_json(sweep / job / "provenance.json") for job in jobs if (sweep / job / "provenance.json").exists()]
    ends = [datetime.fromisoformat(origin["finished"]) for origin in origins if origin.get("finished")]
    return (max(ends) - min(datetime.fromisoformat(origin["started"]) for origin in origins)).total_seconds()


def _write(folder: Path, made: dict[str, Any], figures: list[Path], run: Path) -> None:
    """Write what is kept: how it was made, figures, and the model of a space."""
    for figure in figures:
        shutil.copyfile(figure, folder / figure.name)
    (folder / "run.json").write_text(json.dumps({**made, "figures": [each.name for each in figures]}, indent=2) + "\n")
    for name in ("nodes.json", "paths.json"):
        if (run / name).exists():
            shutil.copyfile(run / name, folder / name)


def _emptied(folder: Path) -> Path:
    """Return a folder without files; folders in it stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.is_file():
            old.unlink()
    return folder


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def chosen(figures: list[Path]) -> list[Path]:
    """Return the figures that are kept, in the order in which they are shown."""

    def rank(figure: Path) -> tuple[int, str]:
        return next((place for place, name in enumerate(_LAST, 1) if figure.name.startswith(name)), 0), figure.name

    return sorted(figures, key=rank)[:NUM_FIGURES]


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(keep(Path(each)))
