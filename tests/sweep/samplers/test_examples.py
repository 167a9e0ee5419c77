"""The examples in the docstrings of samplers."""

import doctest
import importlib
import pkgutil

import pytest

import mlotool.sweep.samplers

pytest.importorskip("optuna")
MODULES = [each.name for each in pkgutil.walk_packages(mlotool.sweep.samplers.__path__, "mlotool.sweep.samplers.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
