"""The examples in the docstrings of hypergradients, their solvers, products and diagnostics."""

import ast
import doctest
import importlib
import inspect
import pkgutil

import pytest

import mlotool.hypergradient

MODULES = [each.name for each in pkgutil.walk_packages(mlotool.hypergradient.__path__, "mlotool.hypergradient.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_an_example(name: str) -> None:
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    public = [
        node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    ]
    assert [node.name for node in public if ">>>" not in (ast.get_docstring(node) or "")] == []
