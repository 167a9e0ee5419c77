"""The page of every key of a recipe: type, default and meaning by the schema, an example by keys.yaml."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mlotool.config.schema import MISSING, dataclass_at, defaults_at, describe_type
from mlotool.core.settings import documentation
from mlotool.problem.settings import ProblemSettings

EXAMPLES: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parent / "keys.yaml").read_text())
NAME = "<name>"
"""Stands for a problem's name in a key."""
SECTIONS = {
    "": "The root",
    f"problems.{NAME}": "A problem",
    "graph": "The graph",
    "evaluate": "Evaluation",
    "runner": "The runner",
    "logger": "The logger",
    "debug": "Limits",
    "sweep": "Sweeps",
}


@dataclass(frozen=True)
class Key:
    """A key of the schema.

    Args:
        path: dotted; `<name>` stands for a problem's name.
        kind: its type, in words.
        default: as YAML has it; None: a recipe must set it.
        meaning: in a sentence or two.
    """

    path: str
    kind: str
    default: str | None
    meaning: str


def schema_keys() -> Iterator[Key]:
    """Yield every key of the schema, those of a problem once."""
    for prefix in SECTIONS:
        yield from section_keys(prefix)


def section_keys(prefix: str) -> Iterator[Key]:
    """Yield the keys below a prefix; a problem's stream, the Trainer and `pbt` have keys of their own."""
    meanings = documentation(ProblemSettings) | documentation(dataclass_at(prefix.replace(NAME, "a")))
    for name, value in defaults_at(prefix.replace(NAME, "a")).items():
        path = f"{prefix}.{name}".lstrip(".")
        yield Key(path, describe_type(path.replace(NAME, "a")), _default(value), meanings[name])
        if path.endswith((".stream", ".trainer", ".pbt")):
            yield from section_keys(path)


def page() -> str:
    """Return the page, in Markdown."""
    lines = [
        "# Every key of a recipe",
        "",
        "A key is set in a recipe's YAML or on the command line, `mlotool run mwn KEY=VALUE`.",
        "`<name>` is the name of a problem. Keys of a node with a `_target_` (a model, a loss, data, an optimizer) are",
        "the arguments of that class or function, which the [API reference](api/index.md) has. Each example sets",
        "another value than the recipe has, `mwn` or the one that it names; keys of sweeps are shown with `-m`.",
    ]
    for prefix, title in SECTIONS.items():
        lines += ["", f"## {title}"]
        for key in section_keys(prefix):
            lines += _entry(key)
    return "\n".join(lines) + "\n"


def _entry(key: Key) -> list[str]:
    example = EXAMPLES[key.path]
    default = example.get("default") or ("none: set it" if key.default is None else f"`{key.default}`")
    needs = f" The example needs {example['needs']}." if "needs" in example else ""
    mode = "-m " if key.path.split(".")[0] == "sweep" else ""
    return [
        "",
        f"### `{key.path}` {{: #{anchor(key.path)} }}",
        "",
        key.meaning,
        "",
        f"Type: {example.get('type', key.kind)}. Default: {default}.{needs}",
        "",
        "```bash",
        f"mlotool run {mode}{example.get('recipe', 'mwn')} {_quoted(example['example'])}",
        "```",
    ]


def anchor(path: str) -> str:
    """Return the anchor of a key's heading.

    Example:
        >>> anchor("problems.<name>.unroll_steps")
        'problems-name-unroll_steps'
    """
    return path.replace("<", "").replace(">", "").replace(".", "-")


def overrides(example: str) -> list[str]:
    """Return an example's overrides: words, of which braces hold theirs together.

    Example:
        >>> overrides("sweep=optuna sweep.params={seed: '0,1'}")
        ['sweep=optuna', "sweep.params={seed: '0,1'}"]
    """
    found: list[str] = []
    for word in example.split(" "):
        if found and found[-1].count("{") > found[-1].count("}"):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def _quoted(example: str) -> str:
    return " ".join(f'"{each}"' if set(each) & set("{}[]<>~*' ") else each for each in overrides(example))


def _default(value: Any) -> str | None:
    if value == MISSING:
        return None
    if isinstance(value, dict) and value:
        return "{..}"
    text: str = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    return text
