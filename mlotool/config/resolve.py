"""A config as plain values, every reference resolved, held to the schema; what is wrong is a fault. No torch."""

import re
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from types import NoneType
from typing import Any, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, InterpolationToMissingValueError, OmegaConfBaseException

from mlotool.config import schema
from mlotool.config.schema import MISSING, ROOT_KEYS, Config, KeyPath, describe_type, members
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, fault_list
from mlotool.core.settings import setting_fault


class Unknown:
    """Stands where a value is missing or a reference leads nowhere, so that the other checks can go on."""

    def __repr__(self) -> str:
        return "???"


UNKNOWN = Unknown()
_OF_DATA = re.compile(r"\$\{data\.(?P<key>\w+(\.\w+)*)\}")
MAX_REFERRED = 500
MAX_DEPTH = 60
MAX_BITS = 63


def is_known(value: Any) -> bool:
    """Say whether a value was found."""
    return not isinstance(value, Unknown)


def resolve_config(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the config as dicts, lists and scalars, and what is wrong with its gaps and references.

    Args:
        config: as it was composed, or plain dicts of the schema's form.

    Raises:
        ConfigError: a part of the schema's own is missing, so that nothing else can be checked.
    """
    if not (isinstance(config, DictConfig) and OmegaConf.get_type(config) is Config):
        config = OmegaConf.merge(OmegaConf.structured(Config), config)
    removed = [key for key in ROOT_KEYS if key not in config]
    if removed:
        raise ConfigError("\n".join(map(_removed, removed)))
    resolver = _Resolver()
    values = resolver.resolved(config, "")
    if any(schema.is_container(fault.partition(":")[0]) for fault in resolver.faults):
        raise ConfigError(fault_list(resolver.faults))
    return values, resolver.faults


def _removed(key: str) -> str:
    kind = describe_type(key)
    value = "null" if kind.endswith("null") else ".."
    return f"~{key}: found a key removed that every config has; expected {kind}. Write {key}={value}."


def limit_expansion(config: DictConfig) -> None:
    """Refuse a config whose references expand without end, before anything else resolves it.

    Raises:
        ConfigError: it does.
    """
    _Resolver().resolved(config, "")


class _Resolver:
    """Resolves the references of a config within limits: they can make a small config endless.

    Attributes:
        faults: found so far.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._num_references = 0
        self._num_values = 0

    def resolved(self, node: Any, path: str) -> Any:
        if isinstance(node, DictConfig):
            return {str(name): self._item(node, name, f"{path}.{name!s}".lstrip(".")) for name in node}
        if isinstance(node, ListConfig):
            return [self._item(node, index, f"{path}[{index}]") for index in range(len(node))]
        return node

    def _item(self, node: Any, key: Any, place: str) -> Any:
        self._num_values += bool(self._num_references)
        if self._num_values > MAX_REFERRED or place.count(".") + place.count("[") > MAX_DEPTH:
            raise ConfigError(
                f"{place[:100]}: its references expand to more than {MAX_REFERRED} values or {MAX_DEPTH} levels; "
                "expected references to plain values. Write the values out."
            )
        if OmegaConf.is_missing(node, key):
            self.faults.append(_missing(place, node))
            return UNKNOWN
        try:
            value = node[key]
        except InterpolationToMissingValueError:
            return UNKNOWN  # the missing value has a fault of its own
        except InterpolationResolutionError as error:
            self.faults.append(_unresolved(place, str(node._get_node(key)._value()), str(error).splitlines()[0]))
            return UNKNOWN
        except (RecursionError, OmegaConfBaseException) as error:
            reason = "a reference that leads back to itself" if isinstance(error, RecursionError) else str(error)
            self.faults.append(f"{place}: found {reason.splitlines()[0]}; expected a value. Correct {place}.")
            return UNKNOWN
        is_reference = OmegaConf.is_interpolation(node, key)
        self._num_references += is_reference
        value = self.resolved(value, place)
        self._num_references -= is_reference
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            # No other check can go on: Python itself does not write such a number.
            raise ConfigError(
                f"{place}: found a whole number of {value.bit_length()} bits; expected at most {MAX_BITS}, as torch's "
                f"numbers have. Correct {place}."
            )
        return value


def _unresolved(place: str, reference: str, reason: str) -> str:
    """Return the message for a reference that leads nowhere."""
    of_data = _OF_DATA.fullmatch(reference)
    if of_data and "not found" in reason:
        parts = place.split(".")
        node = ".".join(parts[:3]) if parts[0] == "problems" else parts[0]
        what = f"found {reference}, while the data has no {of_data['key']}"
        return f"{place}: {what}; expected data that fit. Choose other data (data=..), or another {node}."
    return f"{place}: found {reference} ({reason}); expected a reference to a key that has a value. Correct {place}."


def _missing(place: str, node: Any) -> str:
    parts = place.split(".")
    hint = ""
    if len(parts) == 3 and parts[0] == "problems":
        hint = did_you_mean(parts[1], [str(name) for name in node._get_parent() if name != parts[1]])
        hint += " Or correct the problem's name." if hint else ""
    return f"{place}: nothing is set; expected a value. Write {place}: .. in the recipe.{hint}"


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
    places = (f"{node}.{name}" for node in _NODES if name in schema.keys_at(node.replace("<name>", "name")))
    return _ELSEWHERE.get(name) or next(places, "")


def unknown_key(path: str) -> str:
    """Return the message for a key that the schema does not know at a dotted path."""
    parent, _, key = path.rpartition(".")
    options = schema.keys_at(parent) if parent else tuple(dict.fromkeys((*ROOT_KEYS, *schema.GROUPS)))
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
    for path, value, annotation in schema.walk(values):
        key = ".".join(path)
        is_later = isinstance(value, str) and ("${" in value or value == MISSING)
        plain = [member for member in members(annotation) if schema.node_kind(member) is None]
        if annotation is None and key not in ("hydra", "defaults"):
            yield path, unknown_key(key)
        elif annotation is None or is_later or plain in ([], [NoneType]):
            continue
        elif schema.is_node(value):
            if any(get_origin(member) is list for member in plain):
                yield path, f"{key}: found a node; expected a list. Put brackets around it: [{{_target_: ..}}]."
        elif schema.dataclass_at(key) is not None and not (value is None and NoneType in plain):
            found = "null" if value is None else repr(value)
            yield path, f"{key}: found {found}; expected {describe_type(key)}. Correct it."
        elif fault := setting_fault(key, value, reduce(or_, plain), nodes=True):
            yield path, fault
