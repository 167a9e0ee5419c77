"""The page of errors: every message that mlotool raises, as its code has it, by the part that raises it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from mlotool.core import errors

ROOT = Path(__file__).parents[2] / "mlotool"
KINDS = tuple(name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception))
ANYTHING = "…"
PARTS = {
    "cli": "The command line",
    "config": "Recipes and settings",
    "core": "Your code",
    "problem": "Problems",
    "program": "Programs and graphs",
    "hypergradient": "Hypergradients",
    "data": "Data",
    "losses": "Losses",
    "models": "Models",
    "spaces": "Spaces of models",
    "layerparallel": "Layers in parallel",
    "distributed": "Several processes",
    "runner": "Runs",
    "report": "Pages of runs",
    "sweep": "Sweeps",
    "fusion": "Fused sweeps",
}


def messages() -> Iterator[tuple[str, str, str]]:
    """Yield the part, the class and the message of every error that is raised with one; `…` stands for a value."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            kind = node.exc.func
            if isinstance(kind, ast.Name) and kind.id in KINDS and node.exc.args:
                text = _text(node.exc.args[0])
                if len(text.replace(ANYTHING, "").strip()) > 20:
                    yield path.relative_to(ROOT).parts[0], kind.id, text


def page() -> str:
    """Return the page, in Markdown."""
    lines = [
        "# Errors, and what to do",
        "",
        "A message says what was found, what was expected, and what to do. `…` stands for what differs: a name, a",
        "value. On the command line there is no traceback; `--debug` shows it. Exit codes: 0 done, 1 a run failed,",
        "2 wrong usage or configuration, 130 Ctrl-C, 143 SIGTERM. In Python the class of an error says who can mend",
        "it:",
        "",
        "| class | when |",
        "|---|---|",
    ]
    for name in KINDS:
        lines.append(f"| `mlotool.core.errors.{name}` | {(vars(errors)[name].__doc__ or '').splitlines()[0]} |")
    found = sorted(set(messages()))
    for part, title in PARTS.items():
        own = [(kind, text) for place, kind, text in found if place == part]
        if own:
            lines += ["", f"## {title}", ""]
            lines += [f"- `{kind}`: {_plain(text)}" for kind, text in own]
    return "\n".join(lines) + "\n"


def _text(node: ast.expr) -> str:
    """Return the text of a string in the code; of what is computed, `…`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each) for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ANYTHING


def _plain(text: str) -> str:
    """Return a text in which Markdown finds nothing of its own."""
    for each in "\\`*_{}[]<>#|":
        text = text.replace(each, f"\\{each}" if each != "<" else "&lt;")
    return " ".join(text.split())
