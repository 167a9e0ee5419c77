"""The ranges of the settings that mlotool's own data, models, losses, hypergradients and parallel settings have."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlotool.config.ranges import COUNT, FINITE, POSITIVE, SHARE, WHOLE, Range, named_faults

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
