"""The page of errors and warnings: every message, as the code has it, by the part that it comes from."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mlotool.core import errors

ROOT = Path(__file__).parents[2] / "mlotool"
KINDS = tuple(name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception))
SHOWN = ("MlotoolError", "ConfigError", "RunError")
"""Those that a user catches; all others are of these classes."""
ANYTHING = "…"
PARTS = {
    "cli": "The command line",
    "config": "Recipes and settings",
    "core": "Your code",
    "folders": "Folders of runs and sweeps",
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
    "fitting": "Runs of a script",
    "report": "Pages of runs",
    "sweep": "Sweeps",
    "fusion": "Fused sweeps",
}
WARNING = "warning"
FAULT = "fault"
"""What messages are that are no errors of their own: warnings, and faults that are collected into one error."""


@cache
def messages() -> list[tuple[str, str, str]]:
    """Return the part, the class and the text of every message, once each; `…` stands for a value.

    These are errors that are raised with a text, warnings, and faults: texts with "; expected", wherever they are made.
    """
    found = set[tuple[str, str, str]]()
    for path in sorted(ROOT.rglob("*.py")):
        part = path.relative_to(ROOT).parts[0]
        if part == "templates":
            continue
        for kind, text in _found(ast.parse(path.read_text(encoding="utf-8")), None):
            if len(text.replace(ANYTHING, "").strip()) > 16:
                found.add((part.removesuffix(".py"), kind, text))
    return sorted(found)


def page() -> str:
    """Return the page, in Markdown."""
    lines = [
        "# Errors and warnings, and what to do",
        "",
        "A message says what was found, what was expected, and what to do. `…` stands for what differs: a name, a",
        "value. On the command line there is no traceback; `--debug` shows it. Exit codes: 0 done, 1 a run failed,",
        "2 wrong usage or configuration, 130 Ctrl-C, 143 SIGTERM. A *fault* is a line of an error that lists all that",
        "is wrong with a recipe. In Python the class of an error says who can mend it:",
        "",
        "| class | when |",
        "|---|---|",
    ]
    for name in SHOWN:
        lines.append(f"| [`mlotool.{name}`](api/mlotool.md#mlotool.{name}) | {_first_line(name)} |")
    for part, title in PARTS.items():
        own = [(kind, text) for place, kind, text in messages() if place == part]
        if own:
            lines += ["", f"## {title}", ""]
            lines += [f"- `{kind}`: {_plain(text)}" for kind, text in own]
    return "\n".join(lines) + "\n"


def _first_line(name: str) -> str:
    return (vars(errors)[name].__doc__ or "").splitlines()[0]


def _found(node: ast.AST, kind: str | None) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of the messages below a node of the code.

    Args:
        node: of the code.
        kind: of a text that is its direct child; None where only "; expected" tells.
    """
    if _is_text(node):
        text = _text(node)
        if kind is not None or "; expected" in text:
            yield kind or FAULT, text
        return
    body = getattr(node, "body", None)
    is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
    for child in ast.iter_child_nodes(node):
        if is_documented and body and child is body[0]:
            continue
        yield from _found(child, _kind_of(node) if isinstance(node, ast.Call) and child in node.args[:1] else None)


def _kind_of(call: ast.Call) -> str | None:
    """Return the class of an error, or that it is a warning, of a call that makes one."""
    function = call.func
    if isinstance(function, ast.Name) and function.id in KINDS:
        return function.id
    return WARNING if ast.unparse(function) == "warnings.warn" else None


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


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
