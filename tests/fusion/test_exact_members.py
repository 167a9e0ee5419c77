"""Members of a stack compute what they compute alone, in float64, whatever differs between them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mlotool import ConjugateGradient, Implicit, Neumann, Program, Stream
from tests.fusion.members import Blobs, Compared, bilevel, compared, network, plain

pytestmark = pytest.mark.usefixtures("no_clock")


def check(found: Compared, tolerance: float = 1e-9) -> None:
    assert not found.reasons
    assert found.verdicts
    assert found.error < tolerance
    assert not found.failures


OPTIMIZERS: list[Callable[..., Any]] = [
    partial(torch.optim.SGD, lr=0.1),
    partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True, weight_decay=0.1),
    partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.95)),
    partial(torch.optim.AdamW, lr=0.02, weight_decay=0.3, amsgrad=True),
    partial(torch.optim.RMSprop, lr=0.01),
]


def stepping(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)


SETTINGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "rate": lambda k: {"optimizer": partial(torch.optim.SGD, lr=[0.01, 0.1, 0.3][k], momentum=[0.0, 0.5, 0.9][k])},
    "optimizer": lambda k: {"optimizer": OPTIMIZERS[k]},
    "other optimizers": lambda k: {"optimizer": OPTIMIZERS[k + 2]},
    "betas": lambda k: {
        "optimizer": partial(torch.optim.Adam, lr=0.01, betas=(0.1 * k, 0.9 + 0.03 * k), eps=[1e-8, 1e-4, 0.1][k])
    },
    "scheduler": lambda k: {"scheduler": [None, stepping, cosine][k], "scheduler_interval": "step"},
    "clipping": lambda k: {"gradient_clip_norm": [None, 0.1, 10.0][k]},
    "batches": lambda k: {"stream": Stream(Blobs(40, [5, 5, 6][k]), 8, seed=[1, 2, 1][k])},
    "sizes of the data": lambda k: {"stream": Stream(Blobs([20, 27, 34][k], k), 8, seed=k, drop_last=False)},
    "accumulated": lambda k: {"accumulate_batches": 3},
    "warm-up": lambda k: {"warmup_steps": 4, "unroll_steps": 2},
    "look-ahead": lambda k: {"roll_back": True, "unroll_steps": 2},
    "from the start": lambda k: {"reset_to": "initial", "unroll_steps": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "setting"), [*((bilevel, each) for each in SETTINGS), *((plain, each) for each in [*SETTINGS][:9])]
)
def test_settings_of_steps_differ(make: Callable[..., Program], setting: str) -> None:
    check(compared(lambda k: make(k, **SETTINGS[setting](k)), ticks=12))


def smoothed_loss(batch: Mapping[str, Tensor], *, model: Any, smoothing: float) -> Tensor:
    return functional.cross_entropy(model(batch["input"]), batch["target"], label_smoothing=smoothing)


def tempered_loss(batch: Mapping[str, Tensor], *, model: Any, temperature: float, power: float) -> Tensor:
    losses = functional.cross_entropy(model(batch["input"]) / temperature, batch["target"], reduction="none")
    return (losses**power).mean()


class Assigning(nn.Module):
    """A buffer that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Noisy(torch.optim.SGD):
    """An optimizer that draws random numbers."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += 0.1 * torch.randn_like(parameter)
        super().step(closure)


class Replacing(torch.optim.Optimizer):
    """An optimizer that puts new tensors into the place of its parameters'."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


def frozen() -> nn.Module:
    module = network()
    module[0].requires_grad_(False)  # type: ignore[index]
    return module


POWERS = [partial(tempered_loss, temperature=t, power=p) for t, p in ((1, 1.0), (0.5, 2), (3.0, 1.5))]
IN_EVAL_MODE = {"roles": {"model": {"problem": "classifier", "mode": "eval"}}}
PROGRAMS: dict[str, Callable[[int], Program]] = {
    "numbers of a loss": lambda k: plain(k, loss=POWERS[k]),
    "smoothing": lambda k: plain(k, loss=partial(smoothed_loss, smoothing=[0.0, 0.1, 0.3][k])),
    "frozen parameters": lambda k: bilevel(k, frozen),
    "running statistics": lambda k: plain(k, lambda: network(nn.BatchNorm1d(8))),
    "running statistics below": lambda k: bilevel(k, lambda: network(nn.BatchNorm1d(8))),
    "a role in eval mode": lambda k: bilevel(k, lambda: network(nn.BatchNorm1d(8)), upper=IN_EVAL_MODE),
    "a buffer that is assigned anew": lambda k: bilevel(k, lambda: network(Assigning())),
    "an optimizer with noise": lambda k: bilevel(k, optimizer=partial(Noisy, lr=0.1)),
    "an optimizer that replaces tensors": lambda k: bilevel(k, optimizer=partial(Replacing, lr=[0.1, 0.2, 0.05][k])),
    "cg": lambda k: bilevel(k, hypergradient=Implicit(ConjugateGradient(4, tolerance=1e-2)), unroll_steps=2),
    "neumann": lambda k: bilevel(k, hypergradient=Implicit(Neumann(3, 0.1)), unroll_steps=2),
    "solvers that decide differently": lambda k: bilevel(
        k, lambda: network(Assigning()), hypergradient=Implicit(ConjugateGradient(4, tolerance=0.05))
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:The ConjugateGradient solve")
def test_members_compute_what_they_compute_alone(name: str) -> None:
    check(compared(PROGRAMS[name], ticks=10))


def test_forward_mode() -> None:
    algorithm = Implicit(Neumann(3, 0.1), product="forward")
    assert compared(lambda k: bilevel(k, hypergradient=algorithm, unroll_steps=2), ticks=8).error < 1e-9


def test_bf16() -> None:
    def make(k: int) -> Program:
        program = plain(k, precision="bf16")
        problem = program.problems["classifier"]
        problem.module.float()
        problem.stream.to(dtype=torch.float32)
        return program

    check(compared(make), 0.02)


def test_a_leader_that_leaves_and_a_batch_of_a_new_kind() -> None:
    def make(k: int) -> Program:
        return bilevel(k, lambda: network(nn.BatchNorm1d(8)), stream=Stream(Blobs(40, k), 6, seed=k, drop_last=False))

    found = compared(make, num_members=4, ticks=12, ends={0: 4, 3: 8})
    check(found)
