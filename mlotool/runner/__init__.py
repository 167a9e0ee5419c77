"""Runs a recipe: the only place that knows Lightning and W&B."""

# Eager on purpose: the functions `run` and `load` share their names with their files, so a lazy lookup would find
# the files once these are imported. `mlotool/__init__.py` is lazy in this package's stead.
from mlotool.runner.load import evaluate, load
from mlotool.runner.run import RunResult, run

__all__ = ["RunResult", "evaluate", "load", "run"]
