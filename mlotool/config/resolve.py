"""A config as plain values, with every reference resolved; what cannot be is a fault, not an exception."""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, InterpolationToMissingValueError, OmegaConfBaseException

from mlotool.config.schema import ROOT_KEYS, Config, is_container, keys_at, removed_key, unknown_key
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, fault_list


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


def value_at(values: Any, path: str) -> Any:
    """Return the value at a dotted path of resolved values; None where nothing is."""
    for part in path.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def as_schema(config: Any) -> DictConfig:
    """Return a config that follows the schema, from a composed config or plain dicts."""
    if isinstance(config, DictConfig) and OmegaConf.get_type(config) is Config:
        return config
    merged = OmegaConf.merge(OmegaConf.structured(Config), config)
    assert isinstance(merged, DictConfig)
    return merged


def resolve_config(config: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the config as dicts, lists and scalars, and what is wrong with its keys, gaps and references.

    Raises:
        ConfigError: a part of the schema's own is missing, so that nothing else can be checked.
    """
    removed = [removed_key(key) for key in ROOT_KEYS if key not in config]
    if removed:
        raise ConfigError("\n".join(removed))
    if (
        not OmegaConf.is_missing(config, "data")
        and not OmegaConf.is_interpolation(config, "data")
        and config.data is None
    ):
        # Else each reference to a value of the data were a fault of its own.
        raise ConfigError(
            "data: found null; expected the node that says which data. Write data: {_target_: .., ..}, or "
            "`- override /data: digits` in the recipe's defaults list."
        )
    faults = Faults()
    values = _resolve(config, "", faults)
    if faults.are_all or any(is_container(fault.partition(":")[0]) for fault in faults):
        raise ConfigError(fault_list(faults))
    return values, faults


def limit_expansion(config: DictConfig) -> None:
    """Refuse a config whose references expand without end, before anything else resolves it.

    Raises:
        ConfigError: it does.
    """
    _resolve(config, "", Faults())


class Faults(list[str]):
    """The faults found so far, and how much was resolved: references can make a small config endless."""

    num_references = 0
    """Around the value that is looked at."""
    num_values = 0
    """That references stand for."""
    are_all = False
    """Whether no other check can go on: Python itself does not take such a value."""

    def note(self, path: str) -> None:
        """Count one more value.

        Raises:
            ConfigError: there are too many, or too deep inside each other.
        """
        self.num_values += bool(self.num_references)
        if self.num_values > MAX_REFERRED or path.count(".") + path.count("[") > MAX_DEPTH:
            raise ConfigError(
                f"{path[:100]}: its references expand to more than {MAX_REFERRED} values or {MAX_DEPTH} levels; "
                "expected references that lead to plain values, not around themselves. Write the values out."
            )


def _resolve(node: Any, path: str, faults: Faults) -> Any:
    if isinstance(node, DictConfig):
        return _resolve_mapping(node, path, faults)
    if isinstance(node, ListConfig):
        return [_item(node, index, f"{path}[{index}]", faults) for index in range(len(node))]
    return node


def _resolve_mapping(node: DictConfig, path: str, faults: Faults) -> Any:
    known = keys_at(path)
    values = {}
    for name in node:
        place = f"{path}.{name!s}" if path else str(name)
        if known and name not in known and place != "hydra":
            faults.append(unknown_key(place, known))
        else:
            values[str(name)] = _item(node, name, place, faults)
    return values


def _item(node: Any, key: Any, place: str, faults: Faults) -> Any:
    faults.note(place)
    if OmegaConf.is_missing(node, key):
        faults.append(_missing(place, node))
        return UNKNOWN
    try:
        value = node[key]
    except InterpolationToMissingValueError:
        return UNKNOWN  # the missing value has a fault of its own
    except InterpolationResolutionError as error:
        faults.append(_unresolved(place, str(node._get_node(key)._value()), str(error).splitlines()[0]))
        return UNKNOWN
    except RecursionError:
        faults.append(
            f"{place}: found a reference that leads back to itself; expected one to a value. Correct {place}."
        )
        return UNKNOWN
    except OmegaConfBaseException as error:
        faults.append(f"{place}: {str(error).splitlines()[0]}; expected a value of its type. Correct {place}.")
        return UNKNOWN
    is_reference = OmegaConf.is_interpolation(node, key)
    faults.num_references += is_reference
    resolved = _resolve(value, place, faults)
    faults.num_references -= is_reference
    if isinstance(resolved, int) and resolved.bit_length() > MAX_BITS:
        faults.append(
            f"{place}: found a whole number of {resolved.bit_length()} bits; expected at most {MAX_BITS}, as torch's "
            f"numbers have. Correct {place}."
        )
        faults.are_all = True
    return resolved


def _unresolved(place: str, reference: str, reason: str) -> str:
    """Return the message for a reference that leads nowhere."""
    asked = _OF_DATA.fullmatch(reference)
    if asked and "not found" in reason:
        parts = place.split(".")
        node = ".".join(parts[:3]) if parts[0] == "problems" else parts[0]
        choice = f" (model@{node}=..)" if parts[2:3] == ["module"] else ""
        return (
            f"{place}: found {reference}, while the data has no {asked['key']}; expected data and a {parts[-2]} that "
            f"fit each other. Choose other data (data=..), or another option for {node}{choice}."
        )
    return (
        f"{place}: found {reference} ({reason}); expected a reference to a key that has a value, such as "
        f"${{data.num_classes}}. Correct {place}."
    )


def _missing(place: str, node: Any) -> str:
    parts = place.split(".")
    if len(parts) == 3 and parts[0] == "problems":
        others = [str(name) for name in node._get_parent() if name != parts[1]]
        return (
            f"{place}: nothing is set; expected a node with a _target_.{did_you_mean(parts[1], others)} "
            f"Write {place}: {{_target_: ..}}, or correct the problem's name."
        )
    return f"{place}: nothing is set; expected a value. Write {place}: .. in the recipe, or {place}=.. in the command."
