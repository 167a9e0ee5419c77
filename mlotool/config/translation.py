"""Hydra's, OmegaConf's and YAML's errors in our words: what was found, what was expected, what to do."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    OmegaConfBaseException,
)

from mlotool.config.nulls import missing_choice, null_fault
from mlotool.config.options import unknown_option
from mlotool.config.reading import read_document
from mlotool.config.recipes import unknown_recipe
from mlotool.config.schema import GROUPS, ROOT_KEYS, describe_type, is_container, keys_at, place_of
from mlotool.config.sources import loaded_recipes
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean

_NEW_PROBLEM = (
    "found a problem that the recipe does not have; expected one that it has. Correct the name, or add the problem in "
    "a recipe of yours: its module, loss, optimizer and edges."
)
_FUNCTIONS = ("choice", "range", "interval", "tag", "glob", "sort", "shuffle", "int", "float", "str", "bool")
"""Those of Hydra's grammar that a value may begin with."""

_SPACE = "there is a space in it"
_ORIGIN = re.compile(rf"^In '?(?P<origin>({'|'.join(GROUPS)})/[^':]+)'?: ")


def translate(error: BaseException) -> ConfigError:
    """Return the ConfigError that says what an error of Hydra, OmegaConf or YAML means.

    Args:
        error: as it was caught; its causes are looked through.
    """
    own = next((each for each in _chain(error) if isinstance(each, ConfigError)), None)
    if own is not None:
        return own
    origin = next((f"{found['origin']}: " for each in _chain(error) if (found := _ORIGIN.match(str(each)))), "")
    if isinstance(error, MissingConfigException):
        return _missing(error, origin)
    if isinstance(error, OverrideParseException):
        slip = _slip(error.override)
        advice = f"Quote it for the shell, e.g. '{error.override.partition('=')[0]}=[1,2]'."
        return ConfigError(
            f"Found the override '{error.override}' ({slip}); expected key=value, or +key=value for a new key. "
            f"{'Write each override as a word of its own.' if slip == _SPACE else advice}"
        )
    inner = next((each for each in _chain(error) if isinstance(each, OmegaConfBaseException)), None)
    if inner is not None:
        added = re.match(r"Error merging override \+{1,2}(problems\.[^.=]+)", str(error))
        return ConfigError(f"{added[1]}: {_NEW_PROBLEM}" if added else origin + _node_error(inner))
    return ConfigError(origin + _composition_error(_ORIGIN.sub("", str(error)).strip(), type(error).__name__))


def unknown_key(path: str, options: Sequence[str], advice: str = "") -> str:
    """Return the message for a key that nothing expects.

    Args:
        path: dotted, the key included.
        options: the keys there are in its place.
        advice: what to do; empty: correct it.
    """
    parent, _, key = path.rpartition(".")
    place = f" in {parent}" if parent else ""
    known = f"one of {', '.join(options)}" if options else "no keys"
    return (
        f"{path}: unknown key '{key}'; expected {known}{place}.{did_you_mean(key, options)} "
        f"{advice or 'Correct the key, or remove it.'}"
    )


def unknown_root_key(key: str) -> str:
    """Return the message for a key that the root of a config does not have."""
    if key in GROUPS and key not in ROOT_KEYS:
        kind = {"model": "module"}.get(key, key)
        return (
            f"{key}: found a choice for no problem; expected the node that it is for behind an @. Write "
            f"+{key}@problems.<name>.{kind}=.."
        )
    options = [*ROOT_KEYS, *(group for group in GROUPS if group not in ROOT_KEYS)]
    advice = "Correct the key; everything else belongs under one of these."
    place = "" if did_you_mean(key, options) else place_of(key)
    return unknown_key(key, options, f"Did you mean {place}? {advice}" if place else advice)


def removed_key(path: str) -> str:
    """Return the message for `~path` where the schema has a key."""
    expected = describe_type(path)
    choice = missing_choice(path)
    if choice:
        return (
            f"~{path}: found a key removed that every config has; expected an option of that group. Write {choice}, or "
            f"`- override /{choice.replace('=', ': ')}` in the recipe's defaults list."
        )
    value = "null" if expected.endswith("or null") else ".."
    return f"~{path}: found a key removed that every config has; expected {expected}. Write {path}={value}."


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _first_line(error: BaseException, skip: str = "") -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not skip or not line.startswith(skip)), type(error).__name__)


def _slip(override: str) -> str:
    """Return what is wrong with an override that cannot be parsed, as far as it shows."""
    key, equals, value = override.partition("=")
    odd = next((each for each in override if not (each.isascii() and each.isprintable())), None)
    if not equals:
        return "there is no = in it"
    if not key.strip("+~"):
        return "there is no key before the ="
    if odd is not None:
        return f"the character {odd!r} has to stand in quotes, if it is meant"
    if any(value.count(each) % 2 for each in "'\""):
        return "a quote is not closed"
    if any(value.count(a) != value.count(b) for a, b in ("[]", "{}", "()")):
        return "a bracket is not closed"
    if value.rstrip().endswith(","):
        return "a comma has nothing behind it"
    if " " in key or re.search(r"\s\S+=", value):
        return _SPACE
    called = re.match(r"(\w+)\(", value)
    if called and called[1] not in _FUNCTIONS:
        return f"there is no function {called[1]}; expected one of {', '.join(_FUNCTIONS)}"
    return "its value cannot be read: a list is [1, 2], a mapping {name: 1} without quotes around its names"


def _missing(error: MissingConfigException, origin: str) -> ConfigError:
    group, _, option = (error.missing_cfg_file or "").partition("/")
    if group == "recipe":
        return ConfigError(f"{origin}{unknown_recipe(option)}")
    if group == "hydra":
        return ConfigError(
            f"{origin}found the group 'hydra' in {error.missing_cfg_file}; expected a sweep by mlotool's own keys. "
            "Write sweep=optuna for a search, sweep.workers=2 for jobs at a time, sweep.launcher=slurm for a cluster."
        )
    if group not in GROUPS:
        return ConfigError(
            f"{origin}found the group '{group}'; expected one of {', '.join(GROUPS)}.{did_you_mean(group, GROUPS)} "
            "Correct it."
        )
    folders = re.findall(r"provider=(?:command-line|hydra\.searchpath[^,]*), path=file://(.+)", str(error))
    return ConfigError(f"{origin}{unknown_option(group, option, error.options or (), folders)}")


def _node_error(error: OmegaConfBaseException) -> str:
    path = str(getattr(error, "full_key", None) or getattr(error, "key", None) or "")
    if isinstance(error, InterpolationKeyError):
        return (
            f"{path}: {_first_line(error)}; expected a reference to a key there is, such as ${{data.num_classes}}. "
            "Correct the reference."
        )
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return _key_error(path, error)
    if "does not support deletion" in str(error):
        return removed_key(path)
    value = getattr(error, "value", None)
    if not path:
        path, value = next(filter(None, map(_misplaced, _documents())), ("", value))
    expected = describe_type(path) if path else "mappings, lists and values where the schema has them"
    if path and value == "None" and expected.endswith("or null"):
        return f"{path}: found 'None'; expected {expected}. Write {path}=null."
    if path and ("is not Optional" in str(error) or "'None'" in str(error)):
        return null_fault(path)
    raw = _first_line(error)
    found = raw if value is None else f"found {value!r}"
    odd = re.search(r"Key (\S+) \((\w+)\) is incompatible with \(str\)", raw)
    if odd:
        found, expected = f"found the key {odd[1]}, which YAML takes for no text ({odd[2]})", "a name, or one in quotes"
    if value is None and expected == "a value" and "Cannot merge DictConfig with ListConfig" in raw:
        found, expected = "found a mapping in the place of a list, or the other way round", "the one that is there"
    return f"{path or 'config'}: {found}; expected {expected}. Correct it."


def _documents() -> Iterator[dict[str, Any]]:
    """Yield the recipes that were read, the last one first."""
    for path in reversed(loaded_recipes()):
        yield read_document(path).data


def _misplaced(values: dict[str, Any], parent: str = "") -> tuple[str, Any] | None:
    """Return the first place where the schema has a mapping or a list and a recipe has something else."""
    for key, value in values.items():
        path = f"{parent}.{key}".lstrip(".")
        if value is None or not is_container(path):
            continue
        kind = list if describe_type(path).startswith("a list") else dict
        if not isinstance(value, kind):
            return path, value
        found = _misplaced(value, path) if isinstance(value, dict) else None
        if found is not None:
            return found
    return None


def _key_error(path: str, error: OmegaConfBaseException) -> str:
    parent = path.rpartition(".")[0]
    if not parent:
        return unknown_root_key(path)
    node: Any = getattr(error, "parent_node", None)
    present = [str(key) for key in node] if isinstance(node, DictConfig) else []
    schema = keys_at(parent)
    advice = "" if schema else f"Correct the key, or write +{path}=.. to add a new one."
    return unknown_key(path, schema or present, advice)


def _composition_error(message: str, kind: str) -> str:
    for pattern, describe in _PATTERNS:
        match = re.search(pattern, message, re.DOTALL)
        if match:
            return describe(match)
    text = " ".join(message.split("Config search path")[0].split()) or kind
    return f"{text.rstrip('.')}; expected a recipe and overrides that compose. Correct the override or the recipe."


def _not_in_defaults(match: re.Match[str]) -> str:
    key = match["key"]
    group, _, package = key.partition("@")
    if group not in GROUPS:
        return (
            f"Found the group '{group}'; expected one of {', '.join(GROUPS)}.{did_you_mean(group, GROUPS)} Correct it."
        )
    if group == "recipe":
        return "Found recipe=.. without a plus; expected +recipe=.., as no recipe is chosen yet. Add the plus."
    chosen = re.findall(r"[\w/]+@[\w.]+", match.string.partition("one of")[2].partition("\n")[0]) or _choices()
    known = f"expected one of {', '.join(chosen)}" if chosen else "expected a group that the recipe chooses from"
    correction = "Correct what stands behind the @" if package else "Say behind an @ which node it is for"
    return (
        f"Found the choice '{key}', which is not in the recipe's defaults list; {known}.{did_you_mean(key, chosen)} "
        f"{correction}, or write +{group}@{package or 'problems.<name>.<key>'}=.. to add a choice."
    )


def _choices() -> list[str]:
    """Return the choices in the defaults lists of the recipes that were read."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in loaded_recipes())
    return list(dict.fromkeys(re.findall(r"^\s*- /(\w+@[\w.]+):", text, re.MULTILINE)))


def _unknown_group(match: re.Match[str]) -> str:
    group = match["group"]
    return f"Found the group '{group}'; expected one of {', '.join(GROUPS)}.{did_you_mean(group, GROUPS)} Correct it."


_PATTERNS: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (
        r"^Additional config directory '(?P<folder>.*)' not found",
        lambda match: (
            f"--config-dir: found {match['folder']}, which is not there; expected a folder with config groups. Correct "
            "its path."
        ),
    ),
    (
        r"^Unexpected type for root",
        lambda match: (
            "Found a key to set inside a node that another override has made null, such as evaluate=null "
            "evaluate.batch_size=3; expected one of the two. Remove the other."
        ),
    ),
    (r"^Could not override '(?P<key>[^']*)'", _not_in_defaults),
    (
        r"^Config group override must be a string or a list\. Got (?P<kind>\w+)",
        lambda match: (
            f"Found a {match['kind']} as the choice of one of the groups {', '.join(GROUPS)}; expected the name of an "
            "option, such as debug=fast. Correct the override."
        ),
    ),
    (r"^Invalid Defaults List override '/?(?P<key>[^:']+):", _not_in_defaults),
    (r"config group '(?P<group>[^']+)' does not exist", _unknown_group),
    (
        r"Multiple values for (?P<key>\S+?)\. To override a value use 'override (?P<choice>[^']+)'",
        lambda match: (
            f"{match['key']}: found a second choice; expected one. Write {match['choice'].replace(': ', '=')} without "
            f"a plus on the command line, or `- override /{match['choice']}` last in the recipe's defaults."
        ),
    ),
    (
        r"Ambiguous value for argument '(?P<word>[^']*)'|Sweep parameters '(?P<sweep>.*)' requires",
        lambda match: (
            f"Found several values, {match['word'] or match['sweep']}; expected one. Add -m to run them all, or write "
            "[a,b] for a list."
        ),
    ),
    (
        r"Could not append to config\. An item is already at '(?P<key>[^']+)'",
        lambda match: (
            f"{match['key']}: found a plus for a key that is there already; expected it for new keys only. Write "
            f"{match['key']}=.. without the plus."
        ),
    ),
    (
        r"Could not delete (?:from config\. )?'(?P<key>[^']+)'",
        lambda match: (
            f"Found ~{match['key']}, which there is not; expected a key or choice of the recipe. Run `mlotool show "
            "<recipe> --all` to see them."
        ),
    ),
    (
        r"Override '(?P<choice>[^']+)' is defined before",
        lambda match: (
            f"defaults: found `override /{match['choice'].replace(' :', ':')}` before other entries; expected the "
            "override lines last. Move it to the end of the list."
        ),
    ),
)
