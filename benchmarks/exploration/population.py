"""Population based training and ASHA beside random search and TPE, at equal processor time.

    python -m benchmarks.exploration.population
    python -m benchmarks.exploration.population --tasks plain mwn --seeds 0 1 2

A task is a recipe, made short, with ranges of settings. Each seed is that of the runs and of the search. Population
based training has 8 members (`--members`); the CPU seconds that it takes of this process, on one thread, are the budget
of the others. They train groups (random search of 8, TPE of 2, so that it learns from most trials, ASHA of 4) until the
budget is spent. A group that ends later does not count, unless it is the first one. All begin with the recipe's own
values, and all groups run as one program where they can. Found is the run with the best validation objective of a
checkpoint; its test value is that of this checkpoint.

Rows that the result file has already are not measured again: a call that was stopped goes on.
"""

import argparse
import contextlib
import io
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import torch

from benchmarks.harness import record
from mlotool.config import check, register_sources
from mlotool.config.sweeps.population import draw_population, override_words
from mlotool.config.sweeps.sweep_plan import SweepPlan, job_config, read_sweep
from mlotool.folders.run_folder import RunFolder
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.runner.together import RunRequest, run_together
from mlotool.sweep.study import distributions_of
from mlotool.sweep.study_options import make_pruner, make_study_sampler, pruner_options

_LR = "problems.{}.optimizer.lr=tag(log,interval({},{}))".format
TASKS: dict[str, list[str]] = {
    "mwn": ["runner.max_ticks=600", "evaluate.splits.val=60", "problems.classifier.warmup_steps=100",
            _LR("classifier", 1e-3, 1e-1), _LR("reweight", 1e-4, 1e-1)],
    "plain": ["runner.max_ticks=500", "evaluate.splits.val=50", _LR("classifier", 1e-3, 1.0),
              "problems.classifier.optimizer.weight_decay=tag(log,interval(1e-5,1e-2))",
              "problems.classifier.optimizer.momentum=interval(0,0.95)"],
    "logistic_hpo": ["runner.max_ticks=2000", "evaluate.splits.val=200", _LR("classifier", 1e-3, 1e-1),
                     _LR("decay", 5e-3, 0.5)],
    "data_cleaning": ["runner.max_ticks=500", "evaluate.splits.val=50", _LR("classifier", 1e-3, 1e-1),
                      _LR("weights", 1e-3, 1e-1)],
    "learned_lr": ["runner.max_ticks=400", "evaluate.splits.val=40", _LR("rate", 1e-2, 1.0),
                   "problems.classifier.optimizer.momentum=interval(0,0.95)"],
    "label_correction": ["runner.max_ticks=500", "evaluate.splits.val=50", "problems.classifier.warmup_steps=100",
                         _LR("classifier", 1e-3, 1e-1), _LR("correct", 1e-4, 1e-2), _LR("reweight", 1e-4, 1e-1)],
}  # fmt: skip
METHODS = ("pbt", "random", "tpe", "asha")
GROUPS = {"random": 8, "tpe": 2, "asha": 4}
_SHARED = ["logger=csv", "runner.report=false", "runner.progress_bar=false", "runner.num_threads=1"]
Found = tuple[float, float]


def plan_of(task: str, method: str, seed: int, num_members: int = 8) -> SweepPlan:
    """Return the sweep of a task."""
    choice = {"random": "optuna", "tpe": "optuna"}.get(method, method)
    own = [f"sweep={choice}", f"sweep.num_trials={num_members}", f"sweep.seed={seed}", f"seed={seed}"]
    return read_sweep([f"+recipe={task}", *_SHARED, *TASKS[task], *own])


def train(plan: SweepPlan, points: Sequence[Sequence[str]], folder: Path, **settings: Any) -> list[Found | None]:
    """Train some settings together; return what each has found, None where it did not finish."""
    watches = settings.pop("watches", [None] * len(points))
    requests = []
    for number, (words, watch) in enumerate(zip(points, watches, strict=True)):
        config = job_config(plan, words)
        check(config)
        requests.append(RunRequest(config, folder / str(number), watch=watch))
        (folder / str(number)).mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):
        run_together(requests, record=None, when_ended=lambda place, result: None, **settings)
    return [_found(folder / str(number)) for number in range(len(points))]


def _found(folder: Path) -> Found | None:
    summary = RunFolder(folder).summary()
    if summary.get("status") != "finished":
        return None
    key = "test/" + summary["objective"]["key"].partition("/")[2]
    value = summary["objective"]["value"]
    return None if value is None or math.isnan(value) else (value, summary["metrics"][key])


def population(task: str, seed: int, num_members: int) -> tuple[list[Found | None], float]:
    """Return what the members of a population have found, and the CPU seconds that they took."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        plan, folder = plan_of(task, "pbt", seed, num_members), Path(name)
        members = draw_population(plan)
        members.write(SweepFolder(folder))
        found = train(plan, override_words(members, plan), folder, population=SweepFolder(folder))
    return found, time.process_time() - began


def search(task: str, method: str, seed: int, budget: float) -> tuple[list[Found | None], float]:
    """Return what the trials of a search have found within some CPU seconds, and the seconds that it took."""
    began, found = time.process_time(), list[Found | None]()
    plan = plan_of(task, method, seed)
    sampler = make_study_sampler("tpe" if method == "tpe" else "random", {"constant_liar": True} if method == "tpe"
                                 else {}, seed)  # fmt: skip
    pruner = make_pruner(plan.settings["pruner"], pruner_options(plan))
    study = optuna.create_study(direction="maximize" if plan.mode == "max" else "minimize", sampler=sampler,
                                pruner=pruner)  # fmt: skip
    for values in plan.first_settings():
        study.enqueue_trial(values)
    distributions = distributions_of(plan)
    while time.process_time() - began < budget:
        trials = [study.ask(distributions) for _ in range(GROUPS[method])]
        words = [[f"{key}={trial.params[key]}" for key in distributions] for trial in trials]
        with tempfile.TemporaryDirectory() as name:
            watches = [_watch(trial) if method == "asha" else None for trial in trials]
            results = train(plan, words, Path(name), watches=watches)
            statuses = [RunFolder(Path(name) / str(number)).summary().get("status") for number in range(len(trials))]
        for trial, result, status in zip(trials, results, statuses, strict=True):
            if result is not None:
                study.tell(trial, result[0])
            else:
                states = optuna.trial.TrialState
                study.tell(trial, state=states.PRUNED if status == "pruned" else states.FAIL)
        if time.process_time() - began <= 1.02 * budget or not found:
            found += results
    return found, time.process_time() - began


def _watch(trial: optuna.Trial) -> Any:
    def watch(tick: int, value: float) -> bool:
        trial.report(value, tick)
        # As in a sweep, the recipe's own values are never pruned.
        return trial.number > 0 and trial.should_prune()

    return watch


def measure(task: str, seed: int, num_members: int) -> list[dict[str, Any]]:
    """Return a row for each method."""
    rows, budget = [], 0.0
    for method in METHODS:
        if method == "pbt":
            found, budget = population(task, seed, num_members)
            seconds = budget
        else:
            found, seconds = search(task, method, seed, budget)
        finished = [one for one in found if one is not None]
        sign = 1 if plan_of(task, method, seed).mode == "max" else -1
        best = max(finished, key=lambda one: sign * one[0], default=(math.nan, math.nan))
        rows.append({"task": task, "seed": seed, "method": method, "val": best[0], "test": best[1],
                     "num_trials": len(found), "num_finished": len(finished), "cpu_s": seconds})  # fmt: skip
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each task and method the mean test value with its 95% interval, and how often it is the best."""
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        seeds = sorted({row["seed"] for row in of_task})
        largest = {seed: max(row["test"] for row in of_task if row["seed"] == seed) for seed in seeds}
        for method in METHODS:
            own = [row for row in of_task if row["method"] == method]
            tests = [row["test"] for row in own]
            half = 2.26 * statistics.stdev(tests) / math.sqrt(len(tests)) if len(tests) > 1 else math.nan
            lines.append({
                "task": task, "method": method, "test": statistics.mean(tests), "half_interval": half,
                "val": statistics.mean(row["val"] for row in own),
                "wins": sum(row["test"] >= largest[row["seed"]] for row in own), "seeds": len(own),
                "cpu_s": statistics.mean(row["cpu_s"] for row in own),
                "trials": statistics.mean(row["num_trials"] for row in own),
            })  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--members", type=int, default=8, help="of population based training")
    parser.add_argument("--output", type=Path, default=record.RESULTS / "exploration_population.json")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    register_sources([])
    where = record.surroundings(("torch", "pytorch-lightning", "optuna"))
    before = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    rows: list[dict[str, Any]] = before.get("rows", [])
    if rows and before.get("members") != arguments.members:
        parser.error(f"{arguments.output} is of {before.get('members')} members; give another --output")
    for seed in arguments.seeds:
        for task in arguments.tasks:
            if any((row["task"], row["seed"]) == (task, seed) for row in rows):
                continue
            rows += measure(task, seed, arguments.members)
            record.write(
                "exploration_population",
                {**where, "members": arguments.members, "rows": rows, "summary": summary(rows)},
                arguments.output,
            )
            print(f"{task}, seed {seed}: " + ", ".join(
                f"{row['method']} {row['test']:.4f} ({row['num_finished']}/{row['num_trials']}, {row['cpu_s']:.0f} s)"
                for row in rows[-len(METHODS):]), flush=True)  # fmt: skip
    for line in summary(rows):
        print(f"| {line['task']} | {line['method']} | {line['test']:.4f} +- {line['half_interval']:.4f} | "
              f"{line['wins']} of {line['seeds']} | {line['trials']:.1f} | {line['cpu_s']:.0f} |")  # fmt: skip


if __name__ == "__main__":
    main()
