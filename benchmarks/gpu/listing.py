"""The checks: every file of a package, in the order of their worth."""

from importlib import import_module
from pkgutil import iter_modules

from benchmarks.gpu.check import Check, Job

PACKAGE = "benchmarks.gpu.checks"
LAST, SECONDS_TO_FAIL = 1_000, 60.0


def load(name: str, package: str = PACKAGE) -> Check:
    """Return one check, by the name of its file."""
    found: Check = import_module(f"{package}.{name}").CHECK
    return found


def checks(package: str = PACKAGE) -> dict[str, Check]:
    """Return the checks of a package by the names of their files; one whose file fails comes last, and fails again."""
    found = {}
    for module in iter_modules(import_module(package).__path__):
        try:
            found[module.name] = load(module.name, package)
        except Exception as error:
            title = f"{module.name}: {type(error).__name__}"
            found[module.name] = Check(title, "correctness", LAST, SECONDS_TO_FAIL, _nothing)
    return dict(sorted(found.items(), key=lambda pair: pair[1].order))


def _nothing(job: Job) -> None: ...
