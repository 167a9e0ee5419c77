"""The checks: every file of a package, in the order of their worth."""

from importlib import import_module
from pkgutil import iter_modules

from benchmarks.gpu.check import Check

PACKAGE = "benchmarks.gpu.checks"


def checks(package: str = PACKAGE) -> dict[str, Check]:
    """Return the checks of a package by the names of their files."""
    names = [module.name for module in iter_modules(import_module(package).__path__)]
    found: dict[str, Check] = {name: import_module(f"{package}.{name}").CHECK for name in names}
    return dict(sorted(found.items(), key=lambda pair: pair[1].order))
