"""YAML files of anybody's: read within limits, as plain text, numbers, lists and mappings.

The limits are checked on the parser's events, before anything is built: no tag is ever constructed, no alias expanded.
"""

import pickle
import re
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


@dataclass(frozen=True)
class Document:
    """A YAML file, parsed but not interpreted."""

    path: Path
    text: str
    data: dict[Any, Any]
    num_nodes: int = 0
    """Its values, with aliases expanded; a long text counts as several."""


class _Plain:
    """Reads a date as the text that it is, as OmegaConf does."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build a value; `0b_` is a number to YAML's pattern, and none to Python."""
        try:
            return super().construct_object(node, deep)  # type: ignore[misc]
        except (ValueError, KeyError) as error:
            raise yaml.constructor.ConstructorError(
                None, None, f"found {node.value!r}, which is no number; put quotes around it", node.start_mark
            ) from error


class _Loader(_Plain, yaml.SafeLoader):
    """The parser that OmegaConf has as well."""


class _FastLoader(_Plain, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Written in C it is ten times as fast, but not every PyYAML has it, and OmegaConf reads with the other one."""


def read_document(path: Path, *, is_fast: bool = False, max_nodes: int = MAX_NODES) -> Document:
    """Read a YAML file whose top is a mapping.

    Args:
        path: the file.
        is_fast: read it with PyYAML's C parser; for what no other parser reads again, as Hydra does recipes.
        max_nodes: values that it may have, with aliases expanded.

    Raises:
        ConfigError: it is no such file, or larger, deeper or stranger than a config has to be.
    """
    return parse_document(path, read_text(path), is_fast=is_fast, max_nodes=max_nodes)


def parse_document(path: Path, text: str, *, is_fast: bool = False, max_nodes: int = MAX_NODES) -> Document:
    """Parse the text of a file that was read already, as `read_document` does; the same text once a process."""
    num_nodes, data = _parsed(path, text, _FastLoader if is_fast else _Loader, max_nodes)
    return Document(path, text, pickle.loads(data), num_nodes)


@lru_cache(maxsize=64)
def _parsed(path: Path, text: str, loader: Any, max_nodes: int) -> tuple[int, bytes]:
    """Return the number of a text's values and its content, pickled: whoever asks gets values of his own."""
    try:
        num_nodes = _num_nodes(path, text, loader, max_nodes)
        data = yaml.load(text, loader)
        _check_keys(path, data)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: this is not YAML: {_place(error)}. Correct the file there.") from error
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: found a value that YAML cannot read ({error}); expected plain texts and numbers. Put quotes "
            "around it."
        ) from error
    if data is not None and not isinstance(data, dict):
        raise ConfigError(
            f"{path}: found a {type(data).__name__} at the top; expected keys. Write `key: value` lines; see "
            "`mlotool show mwn`."
        )
    return num_nodes, pickle.dumps(data or {}, pickle.HIGHEST_PROTOCOL)


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
            raise ConfigError(
                f"{path}: found more than {MAX_BYTES} bytes; expected at most {MAX_BYTES}. Keep data in "
                "files of its own."
            )
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected a YAML text file. Correct the file.") from error
    if text.startswith("\N{BYTE ORDER MARK}"):
        raise ConfigError(f"{path}: found a byte order mark; expected UTF-8 without one. Save the file without it.")
    return text.replace("\r\n", "\n")


def leaves(node: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the texts, numbers and nulls of a tree with their dotted keys; empty mappings and lists have none."""
    if isinstance(node, dict):
        return [leaf for key, each in node.items() for leaf in leaves(each, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(node, list):
        return [leaf for index, each in enumerate(node) for leaf in leaves(each, f"{prefix}[{index}]")]
    return [(prefix, node)]


def is_printable(text: str) -> bool:
    """Say whether a text shows as what it is: no control characters, none that turn or hide what is beside them."""
    return text.replace("\n", "").replace("\t", "").isprintable()


def _num_nodes(path: Path, text: str, loader: Any, max_nodes: int) -> int:
    """Return the number of values with aliases expanded; refuse tags, depth, odd texts, and too many values."""
    depth = 0
    # Before a tree is made of them, for which each level is a call.
    for event in yaml.parse(text, loader):
        if getattr(event, "tag", None) is not None:
            raise ConfigError(
                f"{path}: found the YAML tag '{_shown(event.tag)}'{_line(event)}; expected plain values. Remove the "
                "tag."
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _too_deep(path, event)
    root = yaml.compose(text, loader)
    num_nodes, height = (0, 0) if root is None else _Size(path).of(root)
    if height > MAX_DEPTH:
        raise _too_deep(path, root)
    if num_nodes > max_nodes + 1:
        raise ConfigError(
            f"{path}: its aliases and lists expand to more than {max_nodes} values; expected at most {max_nodes}. "
            "Write less, or keep data in files of its own."
        )
    return num_nodes


class _Size:
    """Counts the values and levels of nodes, each node once, however many aliases it has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sizes: dict[int, tuple[int, int] | None] = {}

    def of(self, node: yaml.Node, *, is_key: bool = False) -> tuple[int, int]:
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(self._path, node, is_key=is_key)
            return 1 + len(node.value) // _CHARACTERS_A_NODE, 0
        if id(node) not in self._sizes:
            self._sizes[id(node)] = None
            is_mapping = isinstance(node, yaml.MappingNode)
            if is_mapping:
                self._check_twice(node)
            pairs = node.value if is_mapping else [(None, item) for item in node.value]
            parts = [self.of(item) for _, item in pairs] + [self.of(key, is_key=True) for key, _ in pairs if key]
            heights = [height for _, height in parts]
            self._sizes[id(node)] = 1 + sum(count for count, _ in parts), 1 + max(heights, default=0)
        size = self._sizes[id(node)]
        if size is None:
            raise ConfigError(
                f"{self._path}: an alias contains itself{_line(node)}; expected a tree. Write the value out."
            )
        return size

    def _check_twice(self, node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
                raise ConfigError(
                    f"{self._path}: found the key '{_shown(key.value)}' twice, again{_line(key)}; expected it once. "
                    "Remove one."
                )
            seen.add(str(key.value))


def _too_deep(path: Path, where: Any) -> ConfigError:
    return ConfigError(
        f"{path}: found more than {MAX_DEPTH} levels{_line(where)}; expected at most {MAX_DEPTH} lists and mappings "
        "inside each other. Write less deeply."
    )


def _check_scalar(path: Path, node: yaml.ScalarNode, *, is_key: bool) -> None:
    what, limit = ("key", MAX_KEY) if is_key else ("text", MAX_TEXT)
    if len(node.value) > limit:
        raise ConfigError(
            f"{path}: found the {what} '{_shown(node.value)}' of {len(node.value)} characters{_line(node)}; "
            f"expected at most {limit}. Shorten it."
        )
    if not is_printable(node.value):
        raise ConfigError(
            f"{path}: found the {what} '{_shown(node.value)}' with characters that do not print{_line(node)}; "
            "expected letters, digits and signs. Remove them."
        )
    if not is_key and node.style is None and (read := _misread(node.value)):
        raise ConfigError(
            f"{path}: found {node.value}{_line(node)}, which YAML reads as {read}; expected a number without a zero "
            "or a colon before it. Write the number that you mean, or put quotes around a text."
        )


def _misread(text: str) -> str:
    """Return what YAML 1.1 takes a number with a leading zero or with colons for; nothing where it is none."""
    if re.fullmatch(r"[-+]?0[0-7_]*[0-7]", text):
        return f"the octal number {int(text.replace('_', ''), 8)}"
    return "a number to the base 60" if re.fullmatch(r"[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?", text) else ""


def _check_keys(path: Path, data: Any) -> None:
    """Refuse keys that are no texts: nothing that mlotool builds has such."""
    waiting, seen = [data], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            for key in node:
                if not isinstance(key, str | int) or isinstance(key, bool):
                    raise ConfigError(f"{path}: found the key {key!r}; expected a text. Put quotes around it.")
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _place(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    return problem if mark is None else f"{problem} in line {mark.line + 1}, column {mark.column + 1}"


def _line(where: Any) -> str:
    return f" in line {where.start_mark.line + 1}"


def _shown(text: str) -> str:
    """Return the beginning of a text, with what does not print as escapes."""
    cut = text if len(text) <= _CUT else f"{text[:_CUT]}..."
    return re.sub(r"[^ -~]", lambda found: ascii(found[0])[1:-1], cut) if not is_printable(cut) else cut
