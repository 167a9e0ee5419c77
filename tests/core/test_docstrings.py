"""The whole package: public names show how they are used, and functions take few arguments."""

import ast
import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import mlotool
import mlotool.spaces

ROOT = Path(mlotool.__file__).parent
MAX_PARAMETERS = {"__init__": 13}
"""Of functions by name, `self` included; of all others 9, or 8 outside of classes."""

MODULES = [module.name for module in pkgutil.walk_packages(mlotool.__path__, "mlotool.")]
# What the examples of spaces use as it is offered.
OFFERED = {"torch": torch, **{name: getattr(mlotool.spaces, name) for name in mlotool.spaces.__all__}}


@pytest.mark.parametrize("name", [name for name in MODULES if "template" not in name and "__main__" not in name])
def test_examples(name: str) -> None:
    offered = OFFERED if name.startswith("mlotool.spaces") else None
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs=offered, optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize("package", ["distributed", "hypergradient", "layerparallel"])
def test_public_names_have_examples(package: str) -> None:
    exported = getattr(importlib.import_module(f"mlotool.{package}"), "__all__", None)
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                is_public = exported is None or node.name in exported
                assert not is_public or ">>> " in (ast.get_docstring(node) or ""), node.name


def test_functions_take_few_arguments() -> None:
    """The fields of a dataclass are not counted: it is what settings are gathered in."""
    for path in sorted(ROOT.rglob("*.py")):
        waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
        while waiting:
            node = waiting.pop()
            waiting += getattr(node, "body", []) if isinstance(node, ast.stmt | ast.Module) else []
            if isinstance(node, ast.FunctionDef):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                most = MAX_PARAMETERS.get(node.name, 8 + (names[:1] in (["self"], ["cls"])))
                assert len(names) <= most, f"{path}: {node.name} has {len(names)} parameters, of at most {most}"
