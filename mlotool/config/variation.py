"""The config of a job that differs from what Hydra has composed by plain values alone, which are set in a copy of it.

A composition takes Hydra 0.1 s, which is much beside what a job among others costs. What is done here is the last step
of Hydra's own: values on the command line are set in what the files give. Whatever goes further (an option of a group,
a mapping, another `_target_`, a reference, a key below null) is left to Hydra.
"""

import copy
import re
from collections.abc import Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from mlotool.config.schema import GROUPS, ROOT_KEYS

# No group has a dot in its name, and no root key but these is one.
_KEY = re.compile(r"\+{0,2}(?P<root>[A-Za-z_]\w*)(?P<rest>(\.\w+)*)", re.ASCII)
_SETTERS = (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)


def differing_values(jobs: Sequence[Sequence[str]]) -> list[int]:
    """Return which words of several jobs differ by plain values, so that `varied` may set them.

    Args:
        jobs: the overrides of each.

    Returns:
        Places in each job's overrides; none where the jobs do not have the same keys in the same places.

    Example:
        >>> differing_values([["+recipe=mwn", "seed=0", "data=digits"], ["+recipe=mwn", "seed=1", "data=mnist"]])
        [1]
    """
    keys = {tuple(word.partition("=")[0] for word in words) for words in jobs}
    if len(keys) != 1:
        return []
    [names] = keys
    if any(name.lstrip("+~").startswith("hydra.searchpath") for name in names):
        # A folder of the user's may have a group of any name.
        return []
    differing = [place for place in range(len(names)) if len({words[place] for words in jobs}) > 1]
    plain = [place for place in differing if all(_is_plain(words[place]) for words in jobs)]
    return [place for place in plain if _is_apart(names[place], [*names[:place], *names[place + 1 :]])]


def varied(base: DictConfig, words: Sequence[str]) -> DictConfig | None:
    """Return a copy of a config with the values of some overrides; None where Hydra has to compose it.

    Args:
        base: what Hydra has composed of the job's other overrides.
        words: the overrides, each a plain value at a key.
    """
    config = copy.deepcopy(base)
    try:
        for override in OverridesParser.create().parse_overrides(list(words)):
            if not _fits(config, override):
                return None
            ConfigLoaderImpl._apply_overrides_to_config([override], config)
    except (HydraException, OmegaConfBaseException, ValueError, AssertionError):
        # Hydra says what is wrong.
        return None
    return config


def is_of_hydra(word: str) -> bool:
    """Say whether an override is one of Hydra's own settings, which Hydra keeps apart from those of the config."""
    return word.lstrip("+~").startswith(("hydra.", "hydra/"))


def _is_plain(word: str) -> bool:
    """Say whether an override sets one value at a key of the config."""
    name, sign, value = word.partition("=")
    match = _KEY.fullmatch(name)
    # No mapping, and no reference.
    if match is None or not sign or "{" in value:
        return False
    is_value = bool(match["rest"]) or match["root"] not in GROUPS
    # Decisions of a folder are read where Hydra composes.
    is_value = is_value and match["root"] != "decisions_from"
    return match["root"] in ROOT_KEYS and is_value and not name.rpartition(".")[2].startswith("_")


def _is_apart(name: str, others: Sequence[str]) -> bool:
    """Say whether no other override is of the same key, or of one above or below it."""
    own = f"{_place(name)}."
    return not any(own.startswith(f"{other}.") or f"{other}.".startswith(own) for other in map(_place, others))


def _place(name: str) -> str:
    return name.lstrip("+~").rpartition("@")[2]


def _fits(config: DictConfig, override: Override) -> bool:
    """Say whether an override sets a leaf of a node that is there."""
    value: Any = override.value()
    values = value if isinstance(value, list) else [value]
    if override.type not in _SETTERS or override.is_sweep_override() or override.package is not None:
        return False
    if not all(each is None or isinstance(each, int | float | str) for each in values):
        return False
    if any(isinstance(each, str) and "${" in each for each in values):
        return False
    node: Any = config
    *parents, key = override.key_or_group.split(".")
    for parent in parents:
        node = node._get_node(parent) if isinstance(node, DictConfig) and parent in node else None
        if not isinstance(node, DictConfig) or node._is_none() or node._is_missing() or node._is_interpolation():
            return False
    leaf = node._get_node(key, validate_access=False)
    return not isinstance(leaf, DictConfig) and isinstance(leaf, ListConfig) <= isinstance(value, list)
