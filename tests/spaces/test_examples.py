"""The examples in the docstrings of spaces, which use what the package offers."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import mlotool.losses.shared_weight
import mlotool.spaces

MODULES = [each.name for each in pkgutil.walk_packages(mlotool.spaces.__path__, "mlotool.spaces.")]
OFFERED = {name: getattr(mlotool.spaces, name) for name in mlotool.spaces.__all__}


@pytest.mark.parametrize("name", [*MODULES, "mlotool.losses.shared_weight"])
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    found = doctest.testmod(module, extraglobs={**OFFERED, "torch": torch}, optionflags=doctest.ELLIPSIS)
    assert found.failed == 0
