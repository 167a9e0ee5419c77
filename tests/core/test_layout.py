"""One idea a file, and arguments that one can take in: the whole package, read as text."""

import ast
from collections.abc import Iterator
from pathlib import Path

import mlotool

MAX_LINES = 400
MAX_PARAMETERS = 8
MAX_PARAMETERS_OF_CONSTRUCTOR = 12
FILES = sorted(Path(mlotool.__file__).parent.rglob("*.py"))


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Yield each function with the number of its parameters: the object or class of a method is none."""
    for outer in ast.walk(tree):
        for node in ast.iter_child_nodes(outer):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                is_method = isinstance(outer, ast.ClassDef) and names[:1] in (["self"], ["cls"])
                yield node, len(names) - is_method


def too_many(source: str) -> list[str]:
    """Return the functions of a file that take more than they may.

    The fields of a dataclass are not counted: it is what settings are gathered in.
    """
    found = []
    for node, count in functions(ast.parse(source)):
        most = MAX_PARAMETERS_OF_CONSTRUCTOR if node.name == "__init__" else MAX_PARAMETERS
        if count > most:
            found.append(f"{node.lineno}: {node.name} has {count} parameters, of at most {most}")
    return found


def test_what_is_counted() -> None:
    assert not too_many("def f(a, b, c, d, /, e, f, *rest, g, h, **more): ...")
    assert too_many("def f(a, b, c, d, /, e, f, *, g, h, i): ...") == ["1: f has 9 parameters, of at most 8"]
    nested = "class A:\n  def m(self, a, b, c, d, e, f, g, h):\n    def n(a, b, c, d, e, f, g, h, i): ..."
    assert too_many(nested) == ["3: n has 9 parameters, of at most 8"]
    twelve = ", ".join(f"a{number}" for number in range(12))
    assert not too_many(f"class A:\n  def __init__(self, {twelve}): ...")
    assert too_many(f"class A:\n  def __init__(self, {twelve}, b): ...")


def test_files_hold_one_idea() -> None:
    lines = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert len(lines) > 300
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}


def test_functions_take_few_arguments() -> None:
    found = {str(path): too_many(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: faults for path, faults in found.items() if faults} == {}
