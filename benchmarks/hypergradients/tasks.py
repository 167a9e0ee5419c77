"""The bilevel problems that all rivals share: modules, losses and batches, the same at every call."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.betty import task as digits

Batch = dict[str, Any]
"""`input`, `target`, and `number`: which batch of a fixed partition it is."""
Model = Callable[[Tensor], Tensor]
Detach = Callable[[Tensor], Tensor]

NUM_SAMPLES, NUM_FEATURES = 1000, 20
"""Of the logistic regression: half of the samples are the lower problem's, half the upper one's."""
NUM_SOLVING_STEPS = 200
"""Of gradient descent on the reweighted loss; the proximal term makes it converge in fewer."""


@dataclass(frozen=True)
class Bilevel:
    """Two problems, one shaping the other's solution.

    Args:
        name: of the task.
        make_lower: returns the lower module, at the point where hypergradients are taken.
        make_upper: returns the upper module.
        lower_loss: `(lower, its parameters, upper, batch, detach) -> loss`.
        upper_loss: `(lower, batch) -> loss`.
        lower_batches: without end, in this order.
        upper_batches: likewise.
        learning_rate: of the lower problem's plain SGD; also the step size of series and fixed points.
        num_products: Hessian-vector products of iterative solvers.
        num_steps: of unrolled ones.
        has_cycle: whether a whole training cycle is timed as well.
        nystrom: rank and rho.
        proximal_weight: in the lower loss: curvature that KFAC does not see otherwise.
    """

    name: str
    make_lower: Callable[[], nn.Module]
    make_upper: Callable[[], nn.Module]
    lower_loss: Callable[[Model, Iterable[Tensor], Any, Batch, Detach], Tensor]
    upper_loss: Callable[[Model, Batch], Tensor]
    lower_batches: list[Batch]
    upper_batches: list[Batch]
    learning_rate: float
    num_products: int
    num_steps: int
    has_cycle: bool = True
    nystrom: tuple[int, float] = (10, 10.0)
    proximal_weight: float = 0.0


class PerParameterDecay(nn.Module):
    """The weight decay of each parameter.

    Args:
        start: a vector.
    """

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(start.clone())

    def forward(self) -> Tensor:
        """Return it."""
        return self.value


def decayed_logistic_loss(model: Model, parameters: Iterable[Tensor], decay: Any, batch: Batch, _: Detach) -> Tensor:
    """Return the mean cross entropy plus `0.5 sum_i lambda_i w_i^2` (Grazzi et al. 2020; Betty, appendix D.1)."""
    (weight,) = parameters
    return logistic_loss(model, batch) + 0.5 * (decay() * weight.square()).sum()


def logistic_loss(model: Model, batch: Batch) -> Tensor:
    """Return the mean cross entropy."""
    return functional.binary_cross_entropy_with_logits(model(batch["input"]).squeeze(1), batch["target"])


@lru_cache
def logistic_data(dtype: torch.dtype = torch.float32) -> tuple[Batch, Batch]:
    """Return 500 lower and 500 upper samples of a linear rule in 20 normal features, with a little noise."""
    generator = torch.Generator().manual_seed(0)
    rule = torch.randn(NUM_FEATURES, generator=generator, dtype=torch.float64)
    inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator, dtype=torch.float64)
    noise = torch.randn(NUM_SAMPLES, generator=generator, dtype=torch.float64)
    target = (inputs @ rule + 0.1 * noise > 0).to(dtype)
    half = NUM_SAMPLES // 2
    lower, upper = (
        {"input": inputs[part].to(dtype), "target": target[part], "number": 0}
        for part in (slice(None, half), slice(half, None))
    )
    return lower, upper


@lru_cache
def logistic(dtype: torch.dtype = torch.float32) -> Bilevel:
    """Return weight-decay search at the converged lower solution, with decays from 0.01 to 1."""
    decays = torch.logspace(-2, 0, NUM_FEATURES, dtype=torch.float64)
    lower, upper = logistic_data(dtype)
    solution = _solved(decays)

    def make_lower() -> nn.Module:
        module = nn.Linear(NUM_FEATURES, 1, bias=False).to(dtype)
        with torch.no_grad():
            module.weight.copy_(solution)
        return module

    return Bilevel(
        "logistic",
        make_lower,
        lambda: PerParameterDecay(decays.to(dtype)),
        decayed_logistic_loss,
        logistic_loss,
        [lower],
        [upper],
        learning_rate=1.0,
        num_products=10,
        num_steps=20,
        has_cycle=False,
        nystrom=(20, 1e-4),
    )


def _solved(decays: Tensor) -> Tensor:
    batch = logistic_data(torch.float64)[0]
    weight = torch.zeros(1, NUM_FEATURES, dtype=torch.float64, requires_grad=True)
    # Newton's method: what is left is rounding.
    for _ in range(30):
        loss = decayed_logistic_loss(
            partial(functional.linear, weight=weight), [weight], lambda: decays, batch, Tensor.detach
        )
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        rows = [torch.autograd.grad(each, weight, retain_graph=True)[0].flatten() for each in slope.flatten()]
        with torch.no_grad():
            weight -= torch.linalg.solve(torch.stack(rows), slope.flatten()).view_as(weight)
    return weight.detach()


@lru_cache
def reweighting(model: str, dtype: torch.dtype = torch.float32) -> Bilevel:
    """Return Meta-Weight-Net on long-tailed digits at the lower solution, with a proximal term.

    The proximal term (iMAML's) makes the Hessian positive definite, so that all solvers have the same limit.

    Args:
        model: "mlp" (26,122 parameters) or "resnet" (19,642).
        dtype: of everything.
    """
    settings = digits.Task(model, "cg", dtype=dtype)
    lower_batches, upper_batches = (
        [{**batch, "number": number} for number, batch in enumerate(batches)] for batches in settings.batches()
    )
    # One epoch of each: a fixed partition, which SABA needs.
    lower_batches, upper_batches = lower_batches[:5], upper_batches[:2]

    def lower_loss(lower: Model, parameters: Iterable[Tensor], upper: Any, batch: Batch, detach: Detach) -> Tensor:
        losses = digits.sample_losses(lower(batch["input"]), batch)
        return settings.regularize((upper(detach(losses)) * losses).mean(), parameters)

    def make_lower() -> nn.Module:
        module = settings.make_classifier()
        module.load_state_dict(_solved_reweighting(model))
        return module

    return Bilevel(
        f"MWN {model}",
        make_lower,
        settings.make_weight_net,
        lower_loss,
        lambda lower, batch: digits.mean_loss(lower(batch["input"]), batch),
        lower_batches,
        upper_batches,
        learning_rate=0.05,
        num_products=5,
        num_steps=5,
        proximal_weight=digits.CG_PROXIMAL_WEIGHT,
    )


@lru_cache
def _solved_reweighting(model: str) -> dict[str, Tensor]:
    """Return the lower solution on the first batch, in float64."""
    settings = digits.Task(model, "cg", dtype=torch.float64)
    module, weight_net = settings.make_classifier(), settings.make_weight_net()
    batch, rate = settings.batches()[0][0], 0.05
    parameters = list(module.parameters())
    for _ in range(NUM_SOLVING_STEPS):
        losses = digits.sample_losses(module(batch["input"]), batch)
        loss = settings.regularize((weight_net(losses.detach()) * losses).mean(), parameters)
        with torch.no_grad():
            for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter -= rate * slope
    return module.state_dict()


def make(name: str, dtype: torch.dtype = torch.float32) -> Bilevel:
    """Return a task by name."""
    return logistic(dtype) if name == "logistic" else reweighting(name.removeprefix("MWN "), dtype)


NAMES = ("logistic", "MWN mlp", "MWN resnet")
