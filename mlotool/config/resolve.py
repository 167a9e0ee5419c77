"""A config as plain values, with every reference resolved; what cannot be is a fault, not an exception."""

import re
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, InterpolationToMissingValueError, OmegaConfBaseException

from mlotool.config.schema import ROOT_KEYS, Config, describe_type, is_container
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
    if any(is_container(fault.partition(":")[0]) for fault in resolver.faults):
        raise ConfigError(fault_list(resolver.faults))
    return values, resolver.faults


def _removed(key: str) -> str:
    kind = describe_type(key)
    value = "null" if kind.endswith("null") else ".."
    return f"~{key}: found the removal of a key that every config needs; expected {kind}. Write {key}={value}."


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
