"""What is wrong with keys and values against the schema: every fault of a file or of the overrides at once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlotool.config.names import MAX_NAME, name_fault
from mlotool.config.schema import GROUPS, ROOT_KEYS, Config, describe_type, is_boolean, is_container, keys_at
from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean

Place = tuple[str, ...]

_NODES = (
    "runner",
    "evaluate",
    "logger",
    "sweep",
    "problems.<name>",
    "problems.<name>.stream",
    "graph",
)
_ELSEWHERE = {
    "lr": "problems.<name>.optimizer.lr",
    "learning_rate": "problems.<name>.optimizer.lr",
    "momentum": "problems.<name>.optimizer.momentum",
    "weight_decay": "problems.<name>.optimizer.weight_decay",
    "max_epochs": "runner.max_ticks",
    "epochs": "runner.max_ticks",
    "num_epochs": "runner.max_ticks",
    "max_steps": "runner.max_ticks",
    "steps": "runner.max_ticks",
    "train_iters": "runner.max_ticks",
    "patience": "runner.early_stopping_patience",
    "fast_dev_run": "debug=fast",
    "device": "runner.accelerator",
    "gpus": "runner.devices",
    "ckpt_path": "resume",
    "output_dir": "hydra.run.dir",
    "batch_size": "problems.<name>.stream.batch_size",
    "precision": "runner.precision",
    "trainer": "runner",
    "strategy": "runner.devices",
    "metric": "evaluate.metrics",
    "monitor": "objective",
    "solver": "hypergradient.solver",
    "n_trials": "sweep.num_trials",
    "config": "hypergradient",
}
"""Names of other programs' settings, and those that stand in several nodes."""


def place_of(key: str) -> str:
    """Return where a key is meant to stand; empty where nobody knows.

    Example:
        >>> place_of("max_ticks"), place_of("lr"), place_of("nothing")
        ('runner.max_ticks', 'problems.<name>.optimizer.lr', '')
    """
    name = key.lower()
    found = (f"{node}.{name}" for node in _NODES if name in keys_at(node.replace("<name>", "name")))
    return _ELSEWHERE.get(name) or next(found, "")


def unknown_key(path: str, options: Sequence[str]) -> str:
    """Return the message for a key that nothing expects.

    Args:
        path: dotted, the key included.
        options: the keys there are in its place.
    """
    parent, _, key = path.rpartition(".")
    if not parent:
        options = [*ROOT_KEYS, *(group for group in GROUPS if group not in ROOT_KEYS)]
    hint = did_you_mean(key, options)
    if not parent and not hint and (place := place_of(key)):
        hint = f" Did you mean {place}?"
    known = f"one of {', '.join(options)}" if options else "no keys"
    where = f" in {parent}" if parent else ""
    return f"{path}: unknown key '{key}'; expected {known}{where}.{hint} Correct the key, or remove it."


def removed_key(path: str) -> str:
    """Return the message for `~path` where the schema has a key."""
    kind = describe_type(path)
    value = "null" if kind.endswith("null") else ".."
    return f"~{path}: found a key removed that every config has; expected {kind}. Write {path}={value}."


def schema_faults(content: Mapping[str, Any]) -> dict[Place, str]:
    """Return the places of a file's or an override's content that do not fit the schema, with messages.

    Args:
        content: plain values, from the root of the config on.
    """
    from omegaconf import OmegaConf

    config = OmegaConf.structured(Config)
    return {place: fault for place, fault in _walk(config, content, ()) if fault}


def _walk(config: Any, node: Mapping[str, Any], above: Place) -> Iterator[tuple[Place, str]]:
    known = keys_at(".".join(above)) if above else (*ROOT_KEYS, "hydra", "defaults")
    for key, value in node.items():
        place = (*above, str(key))
        path = ".".join(place)
        if known and key not in known:
            yield place, unknown_key(path, known)
        elif isinstance(value, Mapping) and value and is_container(path):
            yield from _walk(config, value, place)
        elif place not in (("hydra",), ("defaults",)):
            yield place, _type_fault(config, place, value)


def _type_fault(config: Any, place: Place, value: Any) -> str:
    """Return what is wrong with a value, which is written into a config of the schema."""
    from omegaconf.errors import OmegaConfBaseException

    tree = value
    for part in reversed(place):
        tree = {part: tree}
    try:
        config.merge_with(tree)
    # OmegaConf 2.4 raises a TypeError of its own for a list in the place of a mapping.
    except (OmegaConfBaseException, TypeError):
        path = ".".join(place)
        found = "null" if value is None else repr(value)
        return f"{path}: found {found}; expected {describe_type(path)}. Correct it."
    return ""


def boolean_faults(key: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with a number at a dotted path where the schema has true or false.

    OmegaConf alone would take a 3 for true.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and is_boolean(key):
        yield f"{key}: found {value!r}; expected true or false. Correct {key}."


def check_overrides(words: Sequence[str]) -> None:
    """Refuse overrides that give a number for true or false, and a `name` that is too long for a folder.

    Args:
        words: `key=value`, as on the command line; a value may be several, for a sweep.

    Raises:
        ConfigError: with every fault found, one a line.

    Example:
        >>> check_overrides(["problems.classifier.compile=true", "seed=3"])
    """
    faults: list[str] = []
    for word in words:
        key, _, text = word.partition("=")
        if key == "name" and len(text) > MAX_NAME and "$" not in text:
            faults.append(f"name: {name_fault(text)}. Correct it.")
        for each in text.split(","):
            faults += boolean_faults(key.lstrip("+"), _number(each))
    if faults:
        raise ConfigError("\n".join(faults))


def _number(text: str) -> float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
