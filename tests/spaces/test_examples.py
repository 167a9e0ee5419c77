"""The examples in the docstrings of spaces, which use what the package offers, and of layer-parallel training."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import mlotool.layerparallel
import mlotool.losses.cross_entropy
import mlotool.spaces

MODULES = [
    module.name
    for package in (mlotool.spaces, mlotool.layerparallel)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
OFFERED = {name: getattr(mlotool.spaces, name) for name in mlotool.spaces.__all__}


@pytest.mark.parametrize("name", [*MODULES, "mlotool.losses.cross_entropy"])
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    found = doctest.testmod(module, extraglobs={**OFFERED, "torch": torch}, optionflags=doctest.ELLIPSIS)
    assert found.failed == 0
