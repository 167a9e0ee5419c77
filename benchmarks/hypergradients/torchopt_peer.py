"""The tasks in TorchOpt: its functional interface, with a training loop by hand, as its examples have it."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.betty.task import CyclingBatches
from benchmarks.hypergradients.algorithms import NUM_PAIRS, SIGMA, Algorithm, NotOfferedError
from benchmarks.hypergradients.tasks import Batch, Bilevel

Tensors = Sequence[Tensor]


class TorchOpt:
    """TorchOpt on a task.

    Args:
        task: the task.
        algorithm: by which hypergradients are computed.

    Raises:
        NotOfferedError: TorchOpt has no such algorithm.
    """

    def __init__(self, task: Bilevel, algorithm: Algorithm) -> None:
        self.task, kind = task, algorithm.kind
        self._lower, self._upper = task.make_lower(), task.make_upper()
        self.theta, self.phi = tuple(self._lower.parameters()), tuple(self._upper.parameters())
        self._library = importlib.import_module("torchopt")
        self._response: Callable[[Tensors, Tensors, list[Batch]], Tensors]
        steps = task.num_steps
        self._num_steps = 1
        self._gradient = self._by_autograd
        if kind in ("unrolled", "unrolled_kept", "truncated"):
            self._num_steps = steps
            self._response = self._unrolled((steps + 1) // 2 if kind == "truncated" else steps)
        elif kind == "evolution":
            self._num_steps = steps
            self._gradient = self._by_evolution()
        else:
            self._response = self._implicit(_solver(self._library, kind, task))
        self._lower_optimizer = torch.optim.SGD(self.theta, lr=task.learning_rate)
        self._upper_optimizer = torch.optim.Adam(self.phi, lr=1e-3)
        self._lower_stream, self._upper_stream = (
            CyclingBatches(each) for each in (task.lower_batches, task.upper_batches)
        )

    def hypergradient(self) -> list[Tensor]:
        """Return the upper problem's gradient."""
        return list(self._gradient([self.task.lower_batches[0]] * self._num_steps, self.task.upper_batches[0]))

    def cycle(self) -> None:
        """Take the lower steps, and an upper one."""
        batches = [self._lower_stream.next() for _ in range(self._num_steps)]
        if self._num_steps == 1:
            loss = self._lower_loss(self.theta, [each.detach() for each in self.phi], batches[0])
            _step(self._lower_optimizer, self.theta, torch.autograd.grad(loss, self.theta))
            _step(self._upper_optimizer, self.phi, self._gradient(batches, self._upper_stream.next()))
            return
        # The steps that are differentiated are the training steps.
        gradient = self._gradient(batches, self._upper_stream.next())
        with torch.no_grad():
            for parameter, value in zip(self.theta, self._moved, strict=True):
                parameter.copy_(value)
        _step(self._upper_optimizer, self.phi, gradient)

    def _by_autograd(self, batches: list[Batch], upper_batch: Batch) -> Tensors:
        theta = self._response(self.theta, self.phi, batches)
        self._moved = theta
        loss = self.task.upper_loss(_bound(self._lower, theta), upper_batch)
        return torch.autograd.grad(loss, self.phi)

    def _implicit(self, solver: Any) -> Callable[[Tensors, Tensors, list[Batch]], Tensors]:
        functorch: Any = importlib.import_module("functorch")
        implicit = importlib.import_module("torchopt.diff.implicit")

        # TorchOpt flattens the arguments; a batch's number is none of its concern.
        def slope(theta: Tensors, phi: Tensors, batch: Batch) -> Tensors:
            found: Tensors = functorch.grad(self._lower_loss, argnums=0)(theta, phi, batch)
            return found

        @implicit.custom_root(slope, argnums=1, solve=solver)
        def response(theta: Tensors, phi: Tensors, batch: Batch) -> Tensors:
            return tuple(each.detach() for each in theta)

        return lambda theta, phi, batches: response(theta, phi, batches[0])

    def _unrolled(self, num_differentiated: int) -> Callable[[Tensors, Tensors, list[Batch]], Tensors]:
        def response(theta: Tensors, phi: Tensors, batches: list[Batch]) -> Tensors:
            optimizer = self._library.FuncOptimizer(self._library.sgd(lr=self.task.learning_rate))
            theta = tuple(each.detach().requires_grad_() for each in theta)
            for number, batch in enumerate(batches):
                if number == len(batches) - num_differentiated:
                    theta = tuple(each.detach().requires_grad_() for each in theta)
                    phi_here = phi
                elif number < len(batches) - num_differentiated:
                    phi_here = [each.detach() for each in phi]
                theta = optimizer.step(self._lower_loss(theta, phi_here, batch), theta)
            return theta

        return response

    def _by_evolution(self) -> Callable[[list[Batch], Batch], Tensors]:
        zero_order = importlib.import_module("torchopt.diff.zero_order")
        task, names = self.task, range(len(self.phi))

        def value(*arguments: Any) -> Tensor:
            phi, (batches, upper_batch) = arguments[:-1], arguments[-1]
            theta = [each.detach() for each in self.theta]
            for batch in batches:
                with torch.enable_grad():
                    theta = [each.detach().requires_grad_() for each in theta]
                    slopes = torch.autograd.grad(self._lower_loss(theta, phi, batch), theta)
                theta = list(torch._foreach_sub(theta, slopes, alpha=task.learning_rate))
            self._moved = theta
            with torch.no_grad():
                return task.upper_loss(_bound(self._lower, theta), upper_batch)

        dtype = self.phi[0].dtype
        directions = torch.distributions.Normal(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))
        # By its documentation; the directions are drawn from torch's own generator.
        smoothed = zero_order.zero_order(directions, "antithetic", tuple(names), NUM_PAIRS, SIGMA)(value)

        def gradient(batches: list[Batch], upper_batch: Batch) -> Tensors:
            return torch.autograd.grad(smoothed(*self.phi, (batches, upper_batch)), self.phi)

        return gradient

    def _lower_loss(self, theta: Tensors, phi: Tensors, batch: Batch) -> Tensor:
        lower, upper = _bound(self._lower, theta), _bound(self._upper, phi)
        return self.task.lower_loss(lower, theta, upper, batch, Tensor.detach)


def _solver(library: Any, kind: str, task: Bilevel) -> Any:
    linear_solve = importlib.import_module("torchopt.linear_solve")
    rate, count = task.learning_rate, task.num_products
    if kind in ("neumann", "fixed_point"):
        return linear_solve.solve_inv(ns=True, maxiter=count, alpha=rate)
    if kind == "identity":
        return linear_solve.solve_inv(ns=True, maxiter=0, alpha=rate)
    if kind == "cg":
        return linear_solve.solve_cg(maxiter=count, rtol=0.0)
    if kind == "normal_cg":
        return linear_solve.solve_normal_cg(maxiter=count, rtol=0.0)
    if kind == "exact" and task.has_cycle:
        raise NotOfferedError("too many parameters for a dense matrix")
    if kind == "exact":
        return linear_solve.solve_inv()
    raise NotOfferedError("not offered")


def _bound(module: nn.Module, tensors: Tensors) -> Callable[..., Tensor]:
    names = [name for name, _ in module.named_parameters()]
    # functorch refuses to write into a buffer that it has not seen made.
    buffers = {name: each.clone() for name, each in module.named_buffers()}
    given = {**dict(zip(names, tensors, strict=True)), **buffers}
    return lambda *inputs: functional_call(module, given, inputs)


def _step(optimizer: torch.optim.Optimizer, parameters: Tensors, gradient: Tensors) -> None:
    for parameter, value in zip(parameters, gradient, strict=True):
        parameter.grad = value
    optimizer.step()
    optimizer.zero_grad()
