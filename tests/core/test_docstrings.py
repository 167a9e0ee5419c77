"""Public names show how they are used: each class and function has an example that a doctest can run."""

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlotool

ROOT = Path(mlotool.__file__).parent
PACKAGES = ("distributed", "hypergradient", "layerparallel")
"""Of which all exported names have examples; each package runs them in a test of its own."""


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


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_examples(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    exported = getattr(importlib.import_module(f"mlotool.{package}"), "__all__", None)
    found = {path.stem: without_example(path.read_text(encoding="utf-8")) for path in files}
    if exported is not None:
        found = {name: sorted({*names} & {*exported}) for name, names in found.items()}
    assert {path: names for path, names in found.items() if names} == {}
