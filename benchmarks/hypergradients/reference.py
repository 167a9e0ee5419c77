"""The algorithms in plain autograd, with nothing of any library: what all rivals are checked against."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from benchmarks.hypergradients.algorithms import RADIUS
from benchmarks.hypergradients.tasks import Bilevel

Matvec = Callable[[Tensor], Tensor]


class Plain:
    """A task as functions of two flat vectors.

    Args:
        task: in float64, for a check.
    """

    def __init__(self, task: Bilevel) -> None:
        self.task = task
        self._lower, self._upper = task.make_lower(), task.make_upper()
        self.theta = _flat([each.detach() for each in self._lower.parameters()])
        self.phi = _flat([each.detach() for each in self._upper.parameters()])

    def lower_loss(self, theta: Tensor, phi: Tensor) -> Tensor:
        """Return the lower loss on the first batch."""
        lower, parameters = _bound(self._lower, theta)
        return self.task.lower_loss(
            lower, parameters, _bound(self._upper, phi)[0], self.task.lower_batches[0], Tensor.detach
        )

    def upper_loss(self, theta: Tensor) -> Tensor:
        """Return the upper loss on the first batch."""
        return self.task.upper_loss(_bound(self._lower, theta)[0], self.task.upper_batches[0])

    def cotangent(self) -> Tensor:
        """Return `v = dC_upper/dtheta`."""
        theta = self.theta.clone().requires_grad_()
        return torch.autograd.grad(self.upper_loss(theta), theta)[0]

    def implicit(self, solve: Callable[[Matvec, Tensor], Tensor]) -> Tensor:
        """Return `-M^T q` for the `q` of a solver."""
        theta, phi = self.theta.clone().requires_grad_(), self.phi.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.lower_loss(theta, phi), theta, create_graph=True)

        def matvec(vector: Tensor) -> Tensor:
            return torch.autograd.grad(slope, theta, vector, retain_graph=True)[0]

        return -torch.autograd.grad(slope, phi, solve(matvec, self.cotangent()))[0]

    def differenced(self, vector: Tensor) -> Tensor:
        """Return `-M^T q` by a central difference; constants of the loss move with it."""
        phi = self.phi.clone().requires_grad_()
        step = RADIUS / vector.norm()
        above, below = (
            torch.autograd.grad(self.lower_loss(self.theta + sign * step * vector, phi), phi)[0] for sign in (1, -1)
        )
        return (below - above) / (2 * step)

    def unrolled(self, num_steps: int, num_differentiated: int) -> Tensor:
        """Return the gradient through the last steps of plain SGD on the first batch."""
        theta, phi = self.theta.clone().requires_grad_(), self.phi.clone().requires_grad_()
        for number in range(num_steps):
            if number == num_steps - num_differentiated:
                theta = theta.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.lower_loss(theta, phi), theta, create_graph=True)
            theta = theta - self.task.learning_rate * slope
        return torch.autograd.grad(self.upper_loss(theta), phi)[0]


def gradient(plain: Plain, kind: str) -> Tensor:
    """Return the hypergradient of an algorithm that has a plain form."""
    task = plain.task
    rate, count, steps = task.learning_rate, task.num_products, task.num_steps
    if kind == "finite_difference":
        return plain.differenced(plain.cotangent())
    if kind == "sama":
        return plain.differenced(rate * plain.cotangent())
    if kind in ("unrolled", "unrolled_kept", "truncated"):
        return plain.unrolled(steps, (steps + 1) // 2 if kind == "truncated" else steps)
    solvers: dict[str, Callable[[Matvec, Tensor], Tensor]] = {
        "identity": lambda _, vector: rate * vector,
        "neumann": partial(_series, rate=rate, num_products=count),
        "fixed_point": partial(_series, rate=rate, num_products=count),
        "cg": partial(_conjugate_gradient, num_products=count, tolerance=0.0),
        "normal_cg": partial(_normal_conjugate_gradient, num_iterations=count),
        "exact": partial(_conjugate_gradient, num_products=5000, tolerance=1e-14),
    }
    return plain.implicit(solvers[kind])


def exact(plain: Plain) -> Tensor:
    """Return `-M^T H^-1 v`, solved to rounding."""
    return gradient(plain, "exact")


def _series(matvec: Matvec, vector: Tensor, rate: float, num_products: int) -> Tensor:
    term = total = vector
    for _ in range(num_products):
        term = term - rate * matvec(term)
        total = total + term
    return rate * total


def _conjugate_gradient(matvec: Matvec, vector: Tensor, num_products: int, tolerance: float) -> Tensor:
    solution, residual = torch.zeros_like(vector), vector
    direction, squared = residual, residual @ residual
    for _ in range(num_products):
        if squared <= tolerance**2 * (vector @ vector):
            break
        product = matvec(direction)
        step = squared / (direction @ product)
        solution, residual = solution + step * direction, residual - step * product
        previous, squared = squared, residual @ residual
        direction = residual + squared / previous * direction
    return solution


def _normal_conjugate_gradient(matvec: Matvec, vector: Tensor, num_iterations: int) -> Tensor:
    return _conjugate_gradient(lambda u: matvec(matvec(u)), matvec(vector), num_iterations, 0.0)


def _bound(module: torch.nn.Module, vector: Tensor) -> tuple[Callable[..., Tensor], Sequence[Tensor]]:
    named = dict(module.named_parameters())
    parts = vector.split([each.numel() for each in named.values()])
    tensors = {name: part.view_as(like) for part, (name, like) in zip(parts, named.items(), strict=True)}
    buffers = {name: each.clone() for name, each in module.named_buffers()}
    return lambda *inputs: functional_call(module, {**tensors, **buffers}, inputs), list(tensors.values())


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in tensors])
