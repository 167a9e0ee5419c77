"""Numbers that no run can use, found by their names; torch is not asked."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from mlotool.config.own_ranges import MAX_SEED, ROUNDS, node_faults
from mlotool.config.parameter_groups import KEY
from mlotool.config.ranges import COUNT, POSITIVE, WHOLE, Range, named_faults, numbers
from mlotool.config.reading import leaves
from mlotool.config.trusted import is_of_user

Values = Mapping[str, Any]
MAX_THREADS = MAX_DEVICES = 1_024
MAX_TICKS = 10**12
MAX_TASKS = 1_000_000
MIN_PROCESSES = 64
"""As many loaders of data are taken on any machine, so that a recipe does not depend on its cores."""


# What modules take over from the data.
_REFERRED = ("num_classes", "image_shape", "vocabulary_size", "length")
_BELOW_ONE = Range(below=1.0)
_OPTIMIZER = {
    "lr": Range(),  # 0 holds parameters where they are
    "weight_decay": Range(),
    "momentum": _BELOW_ONE,
    "betas": _BELOW_ONE,
    "eps": Range(),
    "alpha": Range(),
    "rho": Range(most=1.0),
    "lr_decay": Range(),
    "dampening": Range(),
    "lambd": Range(),
    "initial_accumulator_value": Range(),
    "max_iter": COUNT,
    "history_size": COUNT,
}
_SCHEDULER = {
    "step_size": COUNT,
    "milestones": COUNT,
    "T_max": COUNT,
    "T_0": COUNT,
    "T_mult": COUNT,
    "total_iters": COUNT,
    "total_steps": COUNT,
    "epochs": COUNT,
    "steps_per_epoch": COUNT,
    "gamma": POSITIVE,
    "eta_min": Range(),
    "base_lr": POSITIVE,
    "max_lr": POSITIVE,
    "min_lr": Range(),
    "factor": Range(above=True),
    "start_factor": Range(above=True, most=1.0),
    "end_factor": Range(most=1.0),
    "patience": WHOLE,
    "cooldown": WHOLE,
    "pct_start": Range(most=1.0),
    "div_factor": POSITIVE,
    "final_div_factor": POSITIVE,
    "step_size_up": COUNT,
    "step_size_down": COUNT,
    "anneal_epochs": WHOLE,
    "swa_lr": POSITIVE,
    "power": Range(),
    "threshold": Range(),
    "base_momentum": _BELOW_ONE,
    "max_momentum": _BELOW_ONE,
}


def number_faults(values: Values) -> Iterator[str]:
    """Yield the numbers that are out of their range."""
    for name, problem in values["problems"].items():
        yield from _loop_faults(f"problems.{name}", problem)
        yield from _optimizer_faults(f"problems.{name}.optimizer", problem.get("optimizer"))
        yield from _scheduler_faults(f"problems.{name}.scheduler", problem.get("scheduler"))
    data = values["data"] if isinstance(values["data"], Mapping) else {}
    yield from node_faults("data", data, {"seed": values["seed"]})
    shared = {name: data[name] for name in _REFERRED if name in data} | {"seed": values["seed"]}
    for key, node in _nodes(values):
        yield from node_faults(key, node, shared)
    seeds = {"seed": values["seed"], "sweep.seed": values["sweep"]["seed"]}
    for key, seed in seeds.items():
        if isinstance(seed, int) and seed > MAX_SEED:
            yield f"{key}: found {seed}; expected a whole number of at most {MAX_SEED} (2^32 - 1). Correct {key}."
    ticks = values["runner"]["max_ticks"]
    if isinstance(ticks, int) and ticks > MAX_TICKS:
        yield f"runner.max_ticks: found {ticks}; expected a whole number of at most {MAX_TICKS}. Correct it."
    threads = values["runner"]["num_threads"]
    if isinstance(threads, int) and threads > MAX_THREADS:
        yield (
            f"runner.num_threads: found {threads}; expected at most {MAX_THREADS}, or null for torch's choice. "
            "Correct runner.num_threads."
        )

    devices = values["runner"]["devices"]
    if isinstance(devices, int) and devices > MAX_DEVICES:
        yield (
            f"runner.devices: found {devices}; expected at most {MAX_DEVICES:,}, as each is a process, or auto. "
            "Correct runner.devices."
        )


def _loop_faults(key: str, problem: Values) -> Iterator[str]:
    """Yield what would keep a problem's first step from ending."""
    most = {"accumulate_batches": ROUNDS.most, "tasks": MAX_TASKS}
    yield from named_faults(
        key, problem, {name: Range(-math.inf, most=each, whole=True) for name, each in most.items()}
    )
    stream, most_workers = problem.get("stream"), max(MIN_PROCESSES, 4 * (os.cpu_count() or 1))
    num_workers = stream.get("num_workers") if isinstance(stream, Mapping) else None
    if isinstance(num_workers, int) and num_workers > most_workers:
        yield (
            f"{key}.stream.num_workers: found {num_workers}; expected at most {most_workers} on this machine, as each "
            f"is a process. Set {key}.stream.num_workers=4."
        )


def _nodes(values: Values) -> Iterator[tuple[str, Any]]:
    """Yield what may hold targets of mlotool's own, beside the data."""
    yield "hypergradient", values["hypergradient"]
    for name, problem in values["problems"].items():
        for kind in ("module", "loss", "hypergradient", "parallel"):
            yield f"problems.{name}.{kind}", problem.get(kind)
    for name, node in values["analyses"].items():
        yield f"analyses.{name}", node


def nan_faults(values: Values, known: Sequence[str]) -> Iterator[str]:
    """Yield where NaN stands, but for the keys that `known` messages name already, and settings of the user's code."""
    keys = {message.partition(": ")[0] for message in known}
    of_user = tuple(
        f"{key}."
        for key, node in [("data", values["data"]), *_nodes(values)]
        if isinstance(node, Mapping) and is_of_user(node.get("_target_"))
    )
    for key, value in leaves({name: each for name, each in values.items() if name != "sweep"}):
        if isinstance(value, float) and math.isnan(value) and key not in keys and not key.startswith(of_user):
            yield f"{key}: found nan; expected a number. Correct {key}."


def _optimizer_faults(key: str, node: Any) -> Iterator[str]:
    if not isinstance(node, Mapping) or not str(node.get("_target_")).startswith("torch.optim."):
        return
    yield from named_faults(key, node, _OPTIMIZER)
    groups = node.get(KEY)
    for index, group in enumerate(groups if isinstance(groups, list) else ()):
        if isinstance(group, Mapping):
            yield from named_faults(f"{key}.{KEY}[{index}]", group, _OPTIMIZER)
    if node.get("nesterov") is True and not (node.get("momentum") and not node.get("dampening")):
        yield (
            f"{key}.nesterov: found true with momentum={node.get('momentum', 0)} and "
            f"dampening={node.get('dampening', 0)}; expected a momentum and no dampening. Set {key}.momentum=0.9, or "
            f"{key}.nesterov=false."
        )


def _scheduler_faults(key: str, node: Any) -> Iterator[str]:
    if not isinstance(node, Mapping) or not str(node.get("_target_")).startswith("torch.optim.lr_scheduler."):
        return
    yield from named_faults(key, node, _SCHEDULER)
    milestones = node.get("milestones")
    if isinstance(milestones, list) and any(a >= b for a, b in pairwise(numbers(milestones))):
        yield f"{key}.milestones: found {milestones}; expected steps in rising order. Sort them, each once."
    factor, is_plateau = node.get("factor"), node["_target_"].endswith(".ReduceLROnPlateau")
    if is_plateau and isinstance(factor, int | float) and factor >= 1:
        yield f"{key}.factor: found {factor}; expected a number less than 1. Correct {key}.factor."
    inner = node.get("schedulers")
    for index, each in enumerate(inner if isinstance(inner, list) else ()):
        yield from _scheduler_faults(f"{key}.schedulers[{index}]", each)
