"""The examples in the docstrings of layer-parallel training."""

import doctest
import importlib
import pkgutil

import pytest

import mlotool.layerparallel

MODULES = [each.name for each in pkgutil.walk_packages(mlotool.layerparallel.__path__, "mlotool.layerparallel.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
