"""Traces beside code of a user's: what is traced unasked, and whose code runs between steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from mlotool import Identity, Implicit, Problem, Stream, losses
from mlotool.config.user_data import LimitedDataset
from mlotool.program.guard import may_change_between_ticks, why_foreign
from tests.program.small import samples

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def network(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *between, nn.Tanh(), nn.Linear(4, 2))


def plain(batch: Any, *, model: Any) -> Tensor:
    return model(batch).square().mean()


def problem(module: nn.Module, loss: Any = plain, optimizer: Any = SGD, data: Any = None, **settings: Any) -> Problem:
    stream = Stream(samples(12) if data is None else data, 4)
    return Problem("p", module, loss, roles={"model": "p"}, stream=stream, optimizer=optimizer, **settings)


class Doubled(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return 2 * tensor


class Slow(torch.optim.SGD):
    pass


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = SGD(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def with_hook(register: Callable[[nn.Module], Any]) -> Callable[[], Problem]:
    def make() -> Problem:
        register(module := network())
        return problem(module, OURS)

    return make


OURS = losses.cross_entropy
LAMBDA = partial(LambdaLR, lr_lambda=lambda step: 0.9**step)
FOREIGN: dict[str, tuple[Callable[[], Problem], str]] = {
    "a loss": (lambda: problem(network(), plain), "the loss of problems.p is code of yours"),
    "a module": (lambda: problem(network(Doubled()), OURS), "the module of problems.p (1) is code of yours"),
    "an activation": (
        lambda: problem(nn.TransformerEncoderLayer(4, 2, 4, activation=lambda tensor: tensor.relu()), OURS),
        "the module of problems.p",
    ),
    "an optimizer's class": (lambda: problem(network(), OURS, Slow), "the optimizer of problems.p is code of yours"),
    "an optimizer's hook": (lambda: problem(network(), OURS, hooked), "the optimizer of problems.p has hooks"),
    "a scheduler": (lambda: problem(network(), OURS, scheduler=LAMBDA), "the scheduler of problems.p is code of yours"),
    "a forward hook": (with_hook(lambda each: each[0].register_forward_hook(lambda *_: None)), "(0) has a hook"),
    "a backward hook": (with_hook(lambda each: each[2].register_full_backward_hook(lambda *_: None)), "(2) has a hook"),
    "a hook of a parameter": (with_hook(lambda each: each[0].bias.register_hook(lambda x: x)), "(0) has a hook"),
    "a parametrization": (
        with_hook(lambda each: nn.utils.parametrize.register_parametrization(each[0], "weight", Doubled())),
        "the module of problems.p",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_users_code_is_not_traced_unasked(name: str) -> None:
    make, reason = FOREIGN[name]
    assert reason in (why_foreign(make()) or "")


def test_code_of_torch_and_mlotool_is() -> None:
    scheduler = partial(StepLR, step_size=3)
    for module in (network(nn.BatchNorm1d(4)), nn.utils.spectral_norm(nn.Linear(3, 2))):
        assert why_foreign(problem(module, OURS, scheduler=scheduler, hypergradient=Implicit(Identity()))) is None


class OwnSamples(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)


CODE_OF_TICKS: dict[str, tuple[Callable[[], Problem], bool]] = {
    "losses and modules are not run": (lambda: problem(network(Doubled()), plain), False),
    "a scheduler of torch's": (lambda: problem(network(), scheduler=partial(StepLR, step_size=2)), False),
    "a function in one": (lambda: problem(network(), scheduler=partial(LambdaLR, lr_lambda=abs)), False),
    "a function of a user's": (lambda: problem(network(), scheduler=LAMBDA), True),
    "an optimizer": (lambda: problem(network(), optimizer=partial(Slow, lr=0.1)), True),
    "data": (lambda: problem(network(), data=OwnSamples(range(8))), True),
    "data inside of ours": (lambda: problem(network(), data=LimitedDataset(OwnSamples(range(8)), 8)), True),
    "a reset": (lambda: problem(network(), reset_to="initial"), True),
}


@pytest.mark.parametrize("name", CODE_OF_TICKS)
def test_whose_code_runs_between_steps_is_known(name: str) -> None:
    make, is_foreign = CODE_OF_TICKS[name]
    assert may_change_between_ticks(make()) == is_foreign
