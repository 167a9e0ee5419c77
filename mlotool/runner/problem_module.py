"""A problem as Lightning sees it: its module, optimizer and scheduler."""

from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mlotool.core.errors import ConfigError
from mlotool.program import Problem, Program
from mlotool.runner.objective import Objective


class ProblemModule(LightningModule):
    """A problem as a LightningModule: callbacks and summaries find its module, optimizer and scheduler here.

    Args:
        problem: the problem; it stays in charge of its steps.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.module = problem.module
        self.problem = problem

    def optimizer_config(self) -> dict[str, Any]:
        """Return what `configure_optimizers` returns for this problem."""
        config: dict[str, Any] = {"optimizer": self.problem.optimizer}
        if self.problem.scheduler is not None:
            config["lr_scheduler"] = {"scheduler": self.problem.scheduler, "name": f"{self.problem.name}/lr"}
        return config

    def values(self, program: Program) -> dict[str, float]:
        """Return the step count and the hyperparameters: the learning rate, and what other problems give."""
        problem = self.problem
        values = {f"{problem.name}/step": float(problem.num_steps)}
        if problem.optimizer is not None:
            # Not every optimizer has one.
            rate = problem.optimizer.param_groups[0].get("lr")
            values |= {} if rate is None else {f"{problem.name}/lr": float(rate)}
        with torch.no_grad():
            given = program.hyperparameters(problem.name)
        for key in problem.settings.optimizer_roles:
            # Of several rates the mean.
            values[f"{problem.name}/{key}"] = torch.stack([each[key].mean() for each in given or ()]).mean().item()
        return values

    def step_scheduler(self, objective: float | None) -> None:
        """Advance a scheduler whose interval is the evaluation.

        Args:
            objective: the objective's last value, for ReduceLROnPlateau.
        """
        problem = self.problem
        if problem.scheduler is None or problem.settings.scheduler_interval != "evaluation":
            return
        if not isinstance(problem.scheduler, ReduceLROnPlateau):
            problem.optimizer_step.step_scheduler()
        elif objective is not None:
            problem.optimizer_step.step_scheduler(objective)


def check_scheduler(problem: Problem, objective: Objective) -> None:
    """Raise ConfigError if a scheduler waits for an objective that it is never given."""
    if not isinstance(problem.scheduler, ReduceLROnPlateau):
        return
    if problem.settings.scheduler_interval == "evaluation" and objective.monitor is not None:
        return
    raise ConfigError(
        f"problems.{problem.name}.scheduler: found ReduceLROnPlateau with scheduler_interval="
        f"{problem.settings.scheduler_interval} and objective={objective.key}; expected scheduler_interval=evaluation "
        "and an objective that is evaluated during training. "
        f"Set problems.{problem.name}.scheduler_interval=evaluation and "
        "give evaluate.splits a number of ticks for the objective's split."
    )
