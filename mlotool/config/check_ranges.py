"""Numbers that no run can use, found by their names; torch is not asked."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mlotool.config.parameter_groups import KEY
from mlotool.config.reading import leaves
from mlotool.config.trusted import is_of_user


@dataclass(frozen=True)
class Range:
    """What a number has to be.

    Args:
        low: the least one.
        above: whether it has to be more than `low`.
        below: what it has to be less than.
        most: the largest one.
        whole: whether it has no fraction.
    """

    low: float = 0.0
    above: bool = False
    below: float = math.inf
    most: float = math.inf
    whole: bool = False

    def holds(self, value: float) -> bool:
        """Say whether a number is in the range; NaN and infinity never are."""
        is_high_enough = value > self.low if self.above else value >= self.low
        return -math.inf < value < math.inf and is_high_enough and value < self.below and value <= self.most

    def __str__(self) -> str:
        what = "a whole number" if self.whole else "a number"
        if self.low == -math.inf:
            return f"{what} that is finite"
        low = f" greater than {self.low:g}" if self.above else f" of at least {self.low:g}"
        if self.below < math.inf:
            return f"{what}{low} and less than {self.below:g}"
        return f"{what}{low}{f' and at most {_shown(self.most)}' if self.most < math.inf else ''}"


FINITE, POSITIVE, SHARE = Range(-math.inf), Range(above=True), Range(most=1.0)
WHOLE, COUNT = Range(whole=True), Range(1, whole=True)


def named_faults(key: str, node: Mapping[str, Any], ranges: Mapping[str, Range]) -> Iterator[str]:
    """Yield the numbers of a node, alone or in a list, that are out of the range of their name."""
    for name, wanted in ranges.items():
        value = node.get(name)
        if not all(wanted.holds(each) for each in numbers(value if isinstance(value, list) else [value])):
            of_all = " for each" if isinstance(value, list) else ""
            yield f"{key}.{name}: found {value}; expected {wanted}{of_all}. Correct {key}.{name}."


def numbers(values: Sequence[Any]) -> list[float]:
    """Return the numbers among values."""
    return [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


MAX_SEED = 2**32 - 1
SEED = Range(most=MAX_SEED, whole=True)
# Layers are made one by one, and samples too: a number with zeros too many would never end.
LAYERS = Range(1, most=10_000, whole=True)
_SAMPLES = Range(1, most=1_000_000, whole=True)
# Done one after the other within a step, which does not end where they are too many.
ROUNDS = Range(1, most=1_000_000, whole=True)
# Columns of as many numbers as a problem has parameters.
_RANK = Range(1, most=10_000, whole=True)

_DATA = {
    "num_classes": COUNT,
    "image_shape": COUNT,
    "vocabulary_size": COUNT,
    "length": _SAMPLES,
    "num_support": _SAMPLES,
    "num_query": _SAMPLES,
    "num_informative": COUNT,
    "num_threads": Range(1, most=1_024, whole=True),
    "seed": SEED,
    "imbalance_factor": Range(1.0),
    "rate": SHARE,
    "noise_rate": SHARE,
    "target_share": SHARE,
    "noise": Range(),
    "max_memory_gb": Range(),
    "mean": FINITE,
    "std": POSITIVE,
    "augment": WHOLE,
    "sizes": WHOLE,
}
_MODELS = {
    **dict.fromkeys(("num_classes", "image_shape", "vocabulary_size", "length", "num_features", "num_samples"), COUNT),
    **dict.fromkeys(("hidden", "width", "channels", "size", "num_heads", "stem_multiplier", "kernel_size"), COUNT),
    **dict.fromkeys(("depth", "num_layers", "num_cells", "num_nodes", "num_stages", "widen_factor"), LAYERS),
    "dropout": Range(below=1.0),
    "final_time": POSITIVE,
    "initial_scale": Range(),
    "initial": POSITIVE,
    "initial_trust": SHARE,
    "radius": Range(),
    "scale": Range(),
}
_LOSSES = {
    **dict.fromkeys(("proximity", "smoothness", "tikhonov", "source_weight"), Range()),
    **dict.fromkeys(("lr", "h"), POSITIVE),
    **dict.fromkeys(("base_class", "victim_class"), WHOLE),
    "num_steps": ROUNDS,
    "num_informative": COUNT,
    "label_smoothing": SHARE,
}
_HYPERGRADIENT = {
    **dict.fromkeys(("step_size", "radius", "sigma", "barrier", "multiplier", "rho"), POSITIVE),
    **dict.fromkeys(("damping", "tolerance", "growth"), Range()),
    **dict.fromkeys(("max_iterations", "max_parameters", "restart_every", "horizon"), COUNT),
    **dict.fromkeys(("num_iterations", "num_pairs", "num_steps", "num_terms"), ROUNDS),
    "rank": _RANK,
    "report_every": WHOLE,
    "seed": SEED,
}
_LAYERPARALLEL = {
    **dict.fromkeys(("stages", "levels", "copies", "workers"), LAYERS),
    **dict.fromkeys(("distillation_steps", "lambda_steps"), ROUNDS),
    **dict.fromkeys(("cycles", "backward_cycles", "guard_max_cycles"), Range(most=1_000_000, whole=True)),
    "guard_every": WHOLE,
    **dict.fromkeys(("record", "recalibrate", "auxnet_blocks"), WHOLE),
    **dict.fromkeys(("h", "guard_threshold", "auxnet_lr", "lambda_lr", "lambda_rate", "beta"), POSITIVE),
    **dict.fromkeys(("tolerance", "backward_tolerance", "noise"), Range()),
    "coarsening": Range(2, whole=True),
}
_RANGES = {
    "mlotool.data.": _DATA,
    "mlotool.models.": _MODELS,
    "mlotool.losses.": _LOSSES,
    "mlotool.hypergradient.": _HYPERGRADIENT,
    "mlotool.layerparallel.": _LAYERPARALLEL,
    "torch.nn.": {
        **dict.fromkeys(("num_layers", "num_encoder_layers", "num_decoder_layers"), LAYERS),
        **dict.fromkeys(("p", "dropout"), SHARE),
    },
}


# A list of no numbers is no shape, and no coarsening.
_NOT_EMPTY = ("image_shape", "coarsening", "mean", "std")


def node_faults(key: str, node: Any, referred: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers out of their range in a node and in the targets inside it.

    Args:
        key: where the node stands.
        node: what stands there.
        referred: values that nodes refer to, by name (`num_classes: ${data.num_classes}`): a fault where they stand.
    """
    waiting = [(key, node)]
    while waiting:
        place, each = waiting.pop()
        if isinstance(each, Mapping):
            yield from _target_faults(place, each, referred)
            waiting += [(f"{place}.{name}", value) for name, value in each.items()]
        elif isinstance(each, list):
            waiting += [(f"{place}[{index}]", value) for index, value in enumerate(each)]


def _target_faults(key: str, node: Mapping[str, Any], referred: Mapping[str, Any]) -> Iterator[str]:
    target = str(node.get("_target_"))
    ranges = next((found for home, found in _RANGES.items() if target.startswith(home)), None)
    if ranges is None:
        return
    yield from named_faults(
        key,
        node,
        {name: each for name, each in ranges.items() if name not in referred or node.get(name) != referred[name]},
    )
    for name in _NOT_EMPTY:
        if name in ranges and node.get(name) == [] and referred.get(name) != []:
            yield f"{key}.{name}: found []; expected at least one number. Correct {key}.{name}."
    noise, sizes = node.get("label_noise"), node.get("sizes")
    if isinstance(noise, Mapping):
        yield from named_faults(f"{key}.label_noise", noise, ranges)
    if isinstance(sizes, Mapping):
        yield from named_faults(f"{key}.sizes", sizes, dict.fromkeys(sizes, WHOLE))


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
