"""Keys that the schema does not know, with what may be meant, and values that are not what it asks for. No torch."""

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from types import NoneType
from typing import Any, get_origin

from mlotool.config.schema import (
    GROUPS,
    MISSING,
    ROOT_KEYS,
    KeyPath,
    dataclass_at,
    describe_type,
    is_node,
    keys_at,
    members,
    node_kind,
    walk,
)
from mlotool.core.messages import did_you_mean
from mlotool.core.settings import setting_fault

_NODES = ("runner", "evaluate", "logger", "sweep", "problems.<name>", "problems.<name>.stream", "graph")
# Names of other programs' settings, and those that stand in several nodes.
_ELSEWHERE = (
    {name: f"problems.<name>.optimizer.{name}" for name in ("lr", "momentum", "weight_decay")}
    | dict.fromkeys(("max_epochs", "epochs", "num_epochs", "max_steps", "steps", "train_iters"), "runner.max_ticks")
    | {"learning_rate": "problems.<name>.optimizer.lr", "batch_size": "problems.<name>.stream.batch_size"}
    | {"patience": "runner.early_stopping_patience", "device": "runner.accelerator", "gpus": "runner.devices"}
    | {"strategy": "runner.devices", "precision": "runner.precision", "trainer": "runner", "fast_dev_run": "debug=fast"}
    | {"ckpt_path": "resume", "output_dir": "hydra.run.dir", "metric": "evaluate.metrics", "monitor": "objective"}
    | {"n_trials": "sweep.num_trials", "solver": "hypergradient.solver", "config": "hypergradient"}
)


def place_of(key: str) -> str:
    """Return where a key is meant to stand; empty where nobody knows.

    Example:
        >>> place_of("max_ticks"), place_of("lr"), place_of("nothing")
        ('runner.max_ticks', 'problems.<name>.optimizer.lr', '')
    """
    name = key.lower()
    places = (f"{node}.{name}" for node in _NODES if name in keys_at(node.replace("<name>", "name")))
    return _ELSEWHERE.get(name) or next(places, "")


def unknown_key(path: str) -> str:
    """Return the message for a key that the schema does not know at a dotted path."""
    parent, _, key = path.rpartition(".")
    options = keys_at(parent) if parent else tuple(dict.fromkeys((*ROOT_KEYS, *GROUPS)))
    hint = did_you_mean(key, options)
    if not parent and not hint and (place := place_of(key)):
        hint = f" Did you mean {place}?"
    where = f" in {parent}" if parent else ""
    return (
        f"{path}: unknown key '{key}'; expected one of {', '.join(options)}{where}.{hint} Correct the key, or "
        "remove it."
    )


def value_faults(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yield keys and values that are not what the schema asks for, nodes and references aside, each with its path.

    Args:
        values: plain, from the root of the config on.
    """
    for path, value, annotation in walk(values):
        key = ".".join(path)
        is_later = isinstance(value, str) and ("${" in value or value == MISSING)
        plain = [member for member in members(annotation) if node_kind(member) is None]
        if annotation is None and key not in ("hydra", "defaults"):
            yield path, unknown_key(key)
        elif annotation is None or is_later or plain in ([], [NoneType]):
            continue
        elif is_node(value):
            if any(get_origin(member) is list for member in plain):
                yield path, f"{key}: found a node; expected a list. Put brackets around it: [{{_target_: ..}}]."
        elif dataclass_at(key) is not None and not (value is None and NoneType in plain):
            found = "null" if value is None else repr(value)
            yield path, f"{key}: found {found}; expected {describe_type(key)}. Correct it."
        elif fault := setting_fault(key, value, reduce(or_, plain), nodes=True):
            yield path, fault
