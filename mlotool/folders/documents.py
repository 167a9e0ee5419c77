"""YAML files of anybody's: read within limits, as plain text, numbers, lists and mappings.

The limits are checked on the parser's events and nodes, before anything is built: no tag is ever constructed, no alias
expanded. Hydra and OmegaConf get what was read here, and read no text themselves.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from mlotool.core.errors import ConfigError

MAX_BYTES = 100_000
MAX_NODES = 20_000
# Reading and composing take milliseconds a value, and a long recipe has two hundred.
MAX_RECIPE_NODES = 1_000
MAX_DEPTH = 40
MAX_TEXT = 2_000
MAX_KEY = 200
# A text counts as one value more for every so many characters, so that aliases do not multiply long ones either.
_CHARACTERS_A_NODE = 20
_CUT = 60
_KEY_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "merge"))
# As OmegaConf reads numbers: to YAML 1.1 `1e-3` is a text.
_FLOAT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$")

# What YAML 1.1 takes for an octal number or one to the base 60.
_ODD_NUMBER = re.compile(r"[-+]?(0[0-7_]*[0-7]|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


@dataclass(frozen=True)
class Document:
    """A YAML file, parsed but not interpreted."""

    path: Path
    text: str
    data: dict[Any, Any]
    # Its values, with aliases expanded; a long text counts as several.
    num_nodes: int = 0

    def line_of(self, place: Sequence[str]) -> int:
        r"""Return the line of a place, counted from 1; where nothing stands there, that of what is above it.

        Example:
            >>> text = "seed: 1\nevaluate:\n  metrics:\n  - accuracy\n"
            >>> Document(Path("mine.yaml"), text, {}).line_of(("evaluate", "metrics[0]"))
            4
        """
        node, line = yaml.compose(self.text, yaml.SafeLoader), 0
        for part in re.findall(r"[^\[\]\0]+", "\0".join(place)):
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            if isinstance(node, yaml.SequenceNode):
                pairs = [(item, item) for item in node.value[int(part) :]]
            key, node = next(((key, item) for key, item in pairs if key is item or key.value == part), (None, None))
            line = line if key is None else key.start_mark.line
        return line + 1


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads a date as the text that it is, as OmegaConf does."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read_document(path: Path, *, max_nodes: int = MAX_NODES) -> Document:
    """Read a YAML file whose top is a mapping.

    Args:
        path: the file.
        max_nodes: values that it may have, with aliases expanded.

    Raises:
        ConfigError: it is no such file, or larger, deeper or stranger than a config has to be.
    """
    return parse_document(path, read_text(path), max_nodes=max_nodes)


def parse_document(path: Path, text: str, *, max_nodes: int = MAX_NODES) -> Document:
    """Parse the text of a file that was read already, as `read_document` does; the same text once a process."""
    num_nodes, data = _parsed(path, text, max_nodes)
    return Document(path, text, deepcopy(data), num_nodes)


@lru_cache(maxsize=256)
def _parsed(path: Path, text: str, max_nodes: int) -> tuple[int, dict[Any, Any]]:
    """Return the number of a text's values, and its content."""
    try:
        num_nodes = _num_nodes(path, text, max_nodes)
        data = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: this is not YAML: {_place(error)}. Correct the file there.") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: found a value that YAML cannot read ({error}). Put quotes around it.") from error
    if data is not None and not isinstance(data, dict):
        raise ConfigError(
            f"{path}: found a {type(data).__name__} at the top; expected keys. Write `key: value` lines; see "
            "`mlotool show mwn`."
        )
    return num_nodes, data or {}


def read_text(path: Path) -> str:
    """Return the text of a file, which is a regular one, in UTF-8, and no larger than a config needs.

    Raises:
        ConfigError: it is not.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: found no regular file; expected a YAML text file. Correct the path.")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path}: found more than {MAX_BYTES} bytes. Keep data in files of its own.")
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected a YAML text file. Correct the file.") from error
    if text.startswith("\N{BYTE ORDER MARK}"):
        raise ConfigError(f"{path}: found a byte order mark; expected UTF-8 without one. Save the file without it.")
    return text.replace("\r\n", "\n")


def leaves(node: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the texts, numbers and nulls of a tree with their dotted keys; empty mappings and lists have none."""
    if isinstance(node, dict):
        return [leaf for key, item in node.items() for leaf in leaves(item, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(node, list):
        return [leaf for index, item in enumerate(node) for leaf in leaves(item, f"{prefix}[{index}]")]
    return [(prefix, node)]


def ends(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what stands below a tree's mappings, by dotted key; lists, and mappings without keys, as they are."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from ends(value, f"{path}.{key}".lstrip("."))
    elif path:
        yield path, node


def value_at(values: Any, path: str) -> Any:
    """Return the value at a dotted path of plain values; None where nothing is."""
    for part in path.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def is_printable(text: str) -> bool:
    """Say whether a text shows as what it is: no control characters, none that turn or hide what is beside them."""
    return text.replace("\n", "").replace("\t", "").isprintable()


def _num_nodes(path: Path, text: str, max_nodes: int) -> int:
    """Return the number of values with aliases expanded; refuse tags, depth, odd texts, and too many values."""
    depth = 0
    # Before a tree is made of them, for which each level is a call.
    for event in yaml.parse(text, _Loader):
        if getattr(event, "tag", None) is not None:
            raise ConfigError(f"{path}: found the YAML tag '{_shown(event.tag)}'{_line(event)}. Remove the tag.")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _too_deep(path, event)
    num_nodes, root = 0, yaml.compose(text, _Loader)
    waiting = [] if root is None else [(root, 0)]
    # An alias is the node itself once more: one that contains itself never ends, but for the limits.
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise _too_deep(path, node)
        items: list[yaml.Node] = []
        num_nodes += 1
        if isinstance(node, yaml.ScalarNode):
            _check_text(path, node, "text", MAX_TEXT)
            # A plain text's style is None, or '' where libyaml has read it.
            if not node.style and _ODD_NUMBER.fullmatch(node.value):
                raise ConfigError(
                    f"{path}: found {node.value}{_line(node)}, which YAML reads as a number in base 8 or 60. Write the "
                    "number in base 10, or put quotes around a text."
                )
            num_nodes += len(node.value) // _CHARACTERS_A_NODE
        elif isinstance(node, yaml.MappingNode):
            num_nodes += _checked_keys(path, [key for key, _ in node.value])
            items = [item for _, item in node.value]
        else:
            items = node.value
        if num_nodes + len(waiting) + len(items) > max_nodes + 1:
            raise ConfigError(
                f"{path}: its aliases and lists expand to more than {max_nodes} values. Write less, or keep data in "
                "files of its own."
            )
        waiting += [(item, depth + 1) for item in reversed(items)]
    return num_nodes


def _checked_keys(path: Path, keys: list[yaml.Node]) -> int:
    """Return how many values keys count for, which are texts, each once."""
    names: set[str] = set()
    for key in keys:
        if not isinstance(key, yaml.ScalarNode) or key.tag not in _KEY_TAGS:
            text = _shown(str(key.value))
            raise ConfigError(f"{path}: found the key {text!r}{_line(key)}; expected a text. Put quotes around it.")
        _check_text(path, key, "key", MAX_KEY)
        if key.value in names and key.value != "<<":
            raise ConfigError(f"{path}: found the key '{_shown(key.value)}' twice, again{_line(key)}. Remove one.")
        names.add(key.value)
    return sum(1 + len(key.value) // _CHARACTERS_A_NODE for key in keys)


def _too_deep(path: Path, where: Any) -> ConfigError:
    return ConfigError(f"{path}: found more than {MAX_DEPTH} levels{_line(where)}. Use fewer levels.")


def _check_text(path: Path, node: yaml.ScalarNode, what: str, limit: int) -> None:
    found = f"{path}: found the {what} '{_shown(node.value)}'"
    if len(node.value) > limit:
        raise ConfigError(
            f"{found} of {len(node.value)} characters{_line(node)}; expected at most {limit}. Shorten it."
        )
    if not is_printable(node.value):
        raise ConfigError(f"{found} with characters that do not print{_line(node)}. Remove them.")


def _place(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    return problem if mark is None else f"{problem} in line {mark.line + 1}, column {mark.column + 1}"


def _line(where: Any) -> str:
    return f" in line {where.start_mark.line + 1}"


def _shown(text: str) -> str:
    """Return the beginning of a text, with what does not print as escapes."""
    cut = text if len(text) <= _CUT else f"{text[:_CUT]}..."
    return re.sub(r"[^ -~]", lambda character: ascii(character[0])[1:-1], cut) if not is_printable(cut) else cut
