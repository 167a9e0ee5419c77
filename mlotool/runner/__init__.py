"""Runs of recipes and scripts, by Lightning's Trainer, with checkpoints and loggers."""

# No file here may have the name of a function below, or importing it would put the module in the function's place.
from mlotool.runner.fitting import fit_built
from mlotool.runner.loading import evaluate, load
from mlotool.runner.run_config import RunResult, run

__all__ = ["RunResult", "evaluate", "fit_built", "load", "run"]
