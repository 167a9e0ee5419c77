"""Hydra's, OmegaConf's and YAML's errors as ConfigErrors: their own text, a name that may be meant, the file's line.

What does not fit the schema is said in one go, for all recipes and overrides of the composition.
"""

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from mlotool.config.recipes import GROUP, list_recipes
from mlotool.config.schema import GROUPS
from mlotool.config.sources import loaded_recipes
from mlotool.config.unknown_keys import value_faults
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, fault_list

_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)
# OmegaConf asserts that what a key is set in is a mapping, and Hydra finds no attribute of what is none.
_OF_LIBRARIES = ("hydra", "omegaconf", "yaml")


@contextmanager
def config_errors(path: Path | None = None, words: Sequence[str] = ()) -> Iterator[None]:
    """Turn the errors of Hydra, OmegaConf and YAML into ConfigErrors, without their tracebacks.

    Args:
        path: of the file that is read, if it is one.
        words: the overrides that are composed.
    """
    try:
        yield
    except Exception as error:
        ours = next((cause for cause in _chain(error) if isinstance(cause, ConfigError)), None)
        if ours is not None:
            raise ours from None
        if not isinstance(error, _ERRORS) and not _is_of_libraries(error):
            raise
        text = "\n".join(_faults(words)) or _text(error)
        raise ConfigError(text if path is None else f"{path}: {text}") from None


def _is_of_libraries(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "").partition(".")[0] in _OF_LIBRARIES


def _faults(words: Sequence[str]) -> list[str]:
    """Return what does not fit the schema in the recipes that were read and in the overrides."""
    faults = [
        f"{document.path}, line {document.line_of(place)}: {fault}"
        for document in loaded_recipes()
        for place, fault in value_faults(document.data)
    ]
    faults += [fault for word in words for _, fault in value_faults(_content(word))]
    return fault_list(faults).splitlines()


def _content(word: str) -> dict[str, Any]:
    """Return what an override sets, from the root of the config on; nothing where it chooses, deletes or sweeps."""
    try:
        [override] = OverridesParser.create().parse_overrides([word])
    except HydraException:
        return {}
    key = override.key_or_group
    if override.is_delete() or override.is_sweep_override() or key in GROUPS or "/" in key or override.package:
        return {}
    value: Any = override.value()
    return dict(reduce(lambda below, part: {part: below}, reversed(key.split(".")), value))


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    seen: set[int] = set()
    # An error may be the context of its own cause.
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _text(error: BaseException) -> str:
    """Return Hydra's own text, with that of its cause, and a name that may be meant."""
    # Hydra does not always say which of the overrides it cannot read.
    said = getattr(error, "override", "")
    for cause in _chain(error):
        text = str(cause).partition("Config search path")[0].strip()
        said += f"\n{text}" if text not in said and isinstance(cause, _ERRORS) else ""
    said = said or str(error)
    hint = next(filter(None, map(_hint, _chain(error))), "")
    first, *rest = (said.strip() or type(error).__name__).splitlines()
    return "\n".join([_defaults_line(first) + first + hint, *rest])


def _defaults_line(said: str) -> str:
    """Return the file and line of the entry of a recipe's defaults list that Hydra's text is about; else nothing."""
    # It begins with the config that has the entry, as `In 'recipe/mwn': `, which may be an entry of another one.
    said = re.sub(r"^In \S+: ", "", said)
    for document in loaded_recipes():
        for index, entry in enumerate(document.data.get("defaults") or ()):
            if any(name in said for name in _in_errors(entry)):
                return f"{document.path}, line {document.line_of((f'defaults[{index}]',))}: "
    return ""


def _in_errors(entry: Any) -> Iterator[str]:
    """Yield how Hydra's errors call an entry of a defaults list."""
    [(key, value)] = entry.items() if isinstance(entry, dict) else [(GROUP, entry.removeprefix("/recipe/"))]
    address = key.split()[-1].removeprefix("/")
    yield f"Could not override '{address}'"
    for option in value if isinstance(value, list) else [value]:
        yield f"'{address.partition('@')[0]}/{option}'"
        yield from (f"'{address} : {option}'", f"'override {address}: {option}'")


def _hint(error: BaseException) -> str:
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return did_you_mean(name, [recipe.name for recipe in list_recipes()] if group == GROUP else error.options or ())
    parent, key = getattr(error, "parent_node", None), getattr(error, "key", None)
    return did_you_mean(str(key), map(str, parent)) if isinstance(parent, DictConfig) and parent else ""
