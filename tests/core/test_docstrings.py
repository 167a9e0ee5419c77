"""Public names show how they are used: each class and function has an example that a doctest can run."""

import ast
import doctest
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlotool

ROOT = Path(mlotool.__file__).parent
PACKAGES = ("distributed", "hypergradient", "layerparallel")
"""Of which all public names have examples; each package runs them in a test of its own."""


def public(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the classes and functions of a module that others may use."""
    for node in tree.body:
        is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_definition and not node.name.startswith("_"):
            yield node


def without_example(source: str) -> list[str]:
    """Return the public classes and functions of a file whose docstrings have nothing that a doctest would run."""
    parser = doctest.DocTestParser()
    return [
        node.name
        for node in public(ast.parse(source))
        if not any(_is_run(each) for each in parser.get_examples(ast.get_docstring(node) or ""))
    ]


def _is_run(example: doctest.Example) -> bool:
    return not example.options.get(doctest.SKIP, False)


def test_what_counts_as_an_example() -> None:
    assert without_example("def f(): ...\nclass A: ...\nclass _B: ...\ndef _g(): ...") == ["f", "A"]
    assert without_example('def f():\n    """Do it.\n\n    Example:\n        f()\n    """') == ["f"]
    assert without_example('def f():\n    """Do it.\n\n    Example:\n        >>> f()\n    """') == []
    assert without_example('def f():\n    """Do it.\n\n    >>> f()  # doctest: +SKIP\n    """') == ["f"]
    # Methods are shown by the example of their class.
    assert without_example('class A:\n    """A.\n\n    >>> A().f()\n    """\n    def f(self): ...') == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_examples(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = {str(path.relative_to(ROOT)): without_example(path.read_text(encoding="utf-8")) for path in files}
    assert {path: names for path, names in found.items() if names} == {}
