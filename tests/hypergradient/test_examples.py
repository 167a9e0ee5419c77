"""The examples in the docstrings of hypergradients, their solvers and products."""

import doctest
import importlib
import pkgutil

import pytest

import mlotool.hypergradient

MODULES = [each.name for each in pkgutil.walk_packages(mlotool.hypergradient.__path__, "mlotool.hypergradient.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
