"""The floor: the same update equations in a plain loop, without a library around them.

It leaves out whatever a careful author would: where no gradient is asked for, no graph is built.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import grad

from benchmarks.betty.rival import Rival
from benchmarks.betty.task import (
    LEARNING_RATE_LOWER,
    LEARNING_RATE_UPPER,
    MOMENTUM,
    NUM_PRODUCTS,
    RADIUS,
    Batch,
    CyclingBatches,
    Task,
    mean_loss,
    sample_losses,
)

Solver = Callable[[list[Tensor], list[nn.Parameter], Sequence[Tensor]], list[Tensor]]


def build(task: Task, *, frozen_constants: bool = False, is_compiled: bool = False) -> Rival:
    """Return the bare loop.

    Args:
        task: the comparison.
        frozen_constants: the weight net's inputs in a finite difference are those of the unperturbed classifier,
            as mlotool's `stop_gradient` has it; else the detached losses move with the perturbation.
        is_compiled: the classifier runs through `torch.compile`.
    """
    classifier, weight_net = task.make_classifier(), task.make_weight_net()
    model = torch.compile(classifier) if is_compiled else classifier
    theta, phi = list(classifier.parameters()), list(weight_net.parameters())
    lower_optimizer = torch.optim.SGD(theta, lr=LEARNING_RATE_LOWER, momentum=MOMENTUM)
    upper_optimizer = torch.optim.Adam(phi, lr=LEARNING_RATE_UPPER)
    train, meta = (CyclingBatches(batches) for batches in task.batches())

    def losses_of(batch: Batch) -> Tensor:
        with task.autocast():
            return sample_losses(model(batch["input"]), batch)

    def finite_difference(batch: Batch, vector: Sequence[Tensor]) -> list[Tensor]:
        scale = RADIUS / torch.linalg.vector_norm(torch.stack(torch._foreach_norm(vector)))
        step = torch._foreach_mul(vector, scale)
        constants = None
        if frozen_constants:
            with torch.no_grad():
                constants = sample_losses(classifier(batch["input"]), batch)

        def gradient() -> Sequence[Tensor]:
            # Without autocast, as in mlotool: a difference divides rounding errors by a small step.
            with torch.no_grad():
                losses = sample_losses(model(batch["input"]), batch)
            return grad((weight_net(losses if constants is None else constants) * losses).mean(), phi)

        data = [parameter.data for parameter in theta]
        torch._foreach_add_(data, step)
        above = gradient()
        torch._foreach_sub_(data, step, alpha=2.0)
        below = gradient()
        torch._foreach_add_(data, step)
        return list(torch._foreach_mul(torch._foreach_sub(below, above), 0.5 / scale))

    def double_backward(batch: Batch, vector: Sequence[Tensor], solve: Solver) -> list[Tensor]:
        losses = losses_of(batch)
        with task.autocast():
            weights = weight_net(losses.detach())
        loss = task.regularize((weights * losses).mean(), theta)
        stationarity = grad(loss, theta, create_graph=True)
        solution = solve(list(stationarity), theta, vector)
        return list(torch._foreach_neg(grad(stationarity, phi, solution)))

    def hypergradient(vector: Sequence[Tensor]) -> list[Tensor]:
        batch = train.last()
        if task.algorithm == "fd":
            return finite_difference(batch, vector)
        return double_backward(batch, vector, _neumann if task.algorithm == "neumann" else _conjugate_gradient)

    def cycle() -> None:
        batch = train.next()
        losses = losses_of(batch)
        with torch.no_grad(), task.autocast():
            weights = weight_net(losses)
        _step(lower_optimizer, theta, grad(task.regularize((weights * losses).mean(), theta), theta))
        batch = meta.next()
        with task.autocast():
            upper_loss = mean_loss(model(batch["input"]), batch)
        vector = grad(upper_loss, theta)
        _step(upper_optimizer, phi, hypergradient(vector))

    return Rival(cycle, classifier, weight_net)


def _step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradient: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, gradient, strict=True):
        parameter.grad = value
    optimizer.step()
    optimizer.zero_grad()


def _neumann(stationarity: list[Tensor], theta: list[nn.Parameter], vector: Sequence[Tensor]) -> list[Tensor]:
    term = total = list(vector)
    for _ in range(NUM_PRODUCTS):
        product = grad(stationarity, theta, term, retain_graph=True)
        term = list(torch._foreach_sub(term, product, alpha=LEARNING_RATE_LOWER))
        total = list(torch._foreach_add(total, term))
    return list(torch._foreach_mul(total, LEARNING_RATE_LOWER))


def _conjugate_gradient(
    stationarity: list[Tensor], theta: list[nn.Parameter], vector: Sequence[Tensor]
) -> list[Tensor]:
    solution: list[Tensor] = [torch.zeros_like(tensor) for tensor in vector]
    residual = direction = list(vector)
    squared = _dot(residual, residual)
    for _ in range(NUM_PRODUCTS):
        product = list(grad(stationarity, theta, direction, retain_graph=True))
        step = squared / _dot(direction, product)
        solution = list(torch._foreach_add(solution, torch._foreach_mul(direction, step)))
        residual = list(torch._foreach_sub(residual, torch._foreach_mul(product, step)))
        previous, squared = squared, _dot(residual, residual)
        direction = list(torch._foreach_add(residual, torch._foreach_mul(direction, squared / previous)))
    return solution


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.sum(x * y) for x, y in zip(a, b, strict=True)]).sum()
