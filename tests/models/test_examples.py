"""The examples in the docstrings of models."""

import doctest
import importlib
import pkgutil

import pytest

import mlotool.models

MODULES = [each.name for each in pkgutil.walk_packages(mlotool.models.__path__, "mlotool.models.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
