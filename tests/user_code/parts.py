"""The user's code of recipes, which copy this file: parts of a case by the number of its run."""

import signal
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.user_code.programs import CASES, STOPS, Samples


class Data:
    splits, num_classes = ("train", "meta"), 3

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def split(self, name: str) -> Samples:
        case = CASES[self.seed]
        return case.train if name == "train" else case.meta


class Ticked(torch.optim.lr_scheduler.LRScheduler):
    """Runs the user's code after each step, beside a scheduler of torch's."""

    def __init__(self, optimizer: Any, seed: int) -> None:
        self.case, self.seed = CASES[seed], seed
        self.inner = None if self.case.scheduler is None else self.case.scheduler(optimizer)
        super().__init__(optimizer)
        self.case.between(0)

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: Any = None) -> None:
        super().step()
        if self.last_epoch > 0:
            if self.inner is not None:
                self.inner.step()
            self.case.between(self.last_epoch)
            if STOPS.get(self.seed) == self.last_epoch:
                del STOPS[self.seed]
                signal.raise_signal(signal.SIGINT)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "inner": None if self.inner is None else self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        if self.inner is not None:
            self.inner.load_state_dict(state_dict["inner"])
        self.case.between(self.last_epoch, is_resumed=True)


def module(seed: int) -> torch.nn.Module:
    return CASES[seed].module


def weigher(seed: int) -> torch.nn.Module:
    return CASES[seed].weigher


def cross_entropy(batch: Any, *, model: Any, seed: int) -> Tensor:
    return CASES[seed].loss()(batch, model=model)


def reweighted_cross_entropy(batch: Any, *, model: Any, weigher: Any, seed: int) -> Tensor:
    return CASES[seed].loss()(batch, model=model, weigher=weigher)


def plain(batch: Any, *, model: Any) -> Tensor:
    return functional.cross_entropy(model(batch["input"]), batch["target"])


def optimizer(params: Any, seed: int) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = CASES[seed].make_optimizer(params)
    return found
