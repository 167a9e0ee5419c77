"""Curvature of Gauss and Newton with its factors, and the step of the optimizer in its place."""

import copy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import KFAC, Identity, Implicit, OptimizerPreconditioner, SolveResult, Status
from mlotool.problem.interface import LowerProblem, LowerView
from mlotool.program import Program, Stream
from tests import programs
from tests.hypergradient.two_levels import ticked, two_levels

needs_curvlinops = pytest.mark.skipif(find_spec("curvlinops") is None, reason="needs the extra curvature")
DAMPING = 0.1


def batch(num_classes: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    if num_classes:
        return {"input": inputs, "target": torch.arange(6) % num_classes}
    return {"input": inputs, "target": torch.randn(6, 2, dtype=torch.float64, generator=generator)}


def lower_loss(module: nn.Module, data: Any) -> LowerView:
    theta = tuple(each.detach() for each in module.parameters() if each.requires_grad)
    return LowerView(LowerProblem("w", module=module), theta, lambda theta, inputs: torch.zeros(()), own_batch=data)


def solve(solver: KFAC, module: nn.Module, data: Any) -> tuple[SolveResult, Tensor]:
    loss = lower_loss(module, data)
    generator = torch.Generator().manual_seed(2)
    vector = [torch.randn(each.shape, dtype=each.dtype, generator=generator) for each in loss.theta]
    result = solver.solve(_never, vector, view=loss)
    assert [tensor.shape for tensor in result.solution] == [tensor.shape for tensor in vector]
    return result, flat(vector)


def _never(vector: Any) -> Any:
    raise AssertionError("it needs no product")


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def gauss_newton(module: nn.Module, data: dict[str, Tensor], loss: str) -> Tensor:
    """Return the dense matrix J^T (d^2 loss / d outputs^2) J."""
    theta = {key: each.detach() for key, each in module.named_parameters()}
    jacobian = jacrev(lambda given: functional_call(module, given, (data["input"],)))(theta)
    outputs = module(data["input"]).detach()
    stacked = torch.cat([each.reshape(*outputs.shape, -1) for each in jacobian.values()], -1)
    total = torch.zeros(stacked.shape[-1], stacked.shape[-1], dtype=torch.float64)
    for row, output in zip(stacked, outputs, strict=True):
        if loss == "cross_entropy":
            p = output.softmax(0)
            curvature = torch.diag(p) - torch.outer(p, p)
        else:
            curvature = 2.0 / len(output) * torch.eye(len(output), dtype=torch.float64)
        total += row.T @ curvature @ row / len(outputs)
    return total


@needs_curvlinops
@pytest.mark.parametrize("kind", ["kfac", "ekfac", "ggn"])
def test_linear_regression_is_exact(kind: Any) -> None:
    """There G is H, and one Kronecker product."""
    module, data = nn.Linear(3, 2).double(), batch()
    hessian = torch.autograd.functional.hessian(
        lambda w, b: nn.functional.mse_loss(nn.functional.linear(data["input"], w, b), data["target"]),
        tuple(each.detach() for each in module.parameters()),
    )
    matrix = torch.cat(
        [torch.cat([hessian[i][j].reshape([6, 2][i], [6, 2][j]) for j in range(2)], 1) for i in range(2)], 0
    )
    assert torch.allclose(matrix, gauss_newton(module, data, "mean_squared_error"))
    result, vector = solve(KFAC(DAMPING, kind, "mean_squared_error", tolerance=1e-12), module, data)
    expected = torch.linalg.solve(matrix + DAMPING * torch.eye(8, dtype=torch.float64), vector)
    assert float((flat(result.solution) - expected).norm() / expected.norm()) < 1e-8
    assert result.status is (Status.CONVERGED if kind == "ggn" else Status.FIXED)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


@pytest.mark.parametrize("loss", ["cross_entropy", "mean_squared_error"])
def test_the_gauss_newton_matrix_of_a_network(loss: Any) -> None:
    module, data = network(), batch(3)
    if loss == "mean_squared_error":
        data["target"] = nn.functional.one_hot(data["target"], 3).double()
    matrix = gauss_newton(module, data, loss) + DAMPING * torch.eye(31, dtype=torch.float64)
    result, vector = solve(KFAC(DAMPING, "ggn", loss, max_iterations=100, tolerance=1e-12), module, data)
    expected = torch.linalg.solve(matrix, vector)
    assert float((flat(result.solution) - expected).norm() / expected.norm()) < 1e-9
    assert result.residual is not None


@needs_curvlinops
def test_the_factors_of_a_network_are_near_its_gauss_newton_matrix() -> None:
    """The factors leave out what ties layers and samples: nearer than the identity, and not G itself."""
    module, data = network(), batch(3)
    with torch.no_grad():
        module[2].weight.mul_(3.0)
    matrix = gauss_newton(module, data, "cross_entropy") + DAMPING * torch.eye(31, dtype=torch.float64)
    for kind in ("kfac", "ekfac"):
        result, vector = solve(KFAC(DAMPING, kind), module, data)
        expected = torch.linalg.solve(matrix, vector)
        error = float((flat(result.solution) - expected).norm() / expected.norm())
        assert 1e-3 < error < 0.7 * float((vector / DAMPING - expected).norm() / expected.norm())


def regression(solver: KFAC) -> Program:
    """Return a linear regression whose targets an upper problem shifts."""
    data = batch()

    def fit(part: dict[str, Tensor], *, w: Any, u: Any) -> Tensor:
        return nn.functional.mse_loss(w(part["input"]), part["target"] + u())

    torch.manual_seed(0)
    module = nn.Linear(3, 2).double()
    samples = [{key: value[index] for key, value in data.items()} for index in range(6)]
    upper = programs.Point(programs.vector(1, 2)), lambda _, *, w: (w(data["input"]) ** 2).sum()
    return two_levels((module, fit), upper, Implicit(solver), stream=Stream(samples, 6, shuffle=False))


@needs_curvlinops
def test_in_a_program() -> None:
    """Linear regression with a target that the upper problem gives: H, and so G, does not depend on it."""
    program = regression(KFAC(1e-9, loss="mean_squared_error"))
    module, inputs = program.problems["w"].module, batch()["input"]
    # A shift of all targets shifts the solution's bias alone, by as much.
    expected = torch.autograd.grad((module(inputs) ** 2).sum(), module.bias)[0]
    assert torch.allclose(program.gradient("u")["x"], expected, rtol=1e-6)
    with pytest.raises(ConfigError, match=r"problems\.low\.hypergradient\.solver: found solver without a derivative"):
        programs.nested().program(lambda: Implicit(KFAC()))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
}


def program(optimizer: Any, hypergradient: Any, clip: float | None = None) -> Program:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    batch = programs.matrix(3)

    def fit(_: Any, *, w: Any, u: Any) -> Tensor:
        return ((w(batch).squeeze(-1) - u()) ** 2).mean() + 0.5 * sum((each**2).sum() for each in w.parameters())

    upper = programs.Point(programs.vector(1)), lambda _, *, w: (w(batch) ** 2).sum()
    settings = {"optimizer": optimizer, "gradient_clip_norm": clip}
    of_upper = {"optimizer": partial(torch.optim.SGD, lr=1e-3)}
    return two_levels((net, fit), upper, hypergradient, of_upper=of_upper, **settings)


def stepped(made: Program, gradient: Tensor) -> Tensor:
    """Return the parameters after a step of a copy of torch's own optimizer."""
    lower = copy.deepcopy(made.problems["w"])
    parts = gradient.split([each.numel() for each in lower.theta.values()])
    lower.step([part.view_as(each) for part, each in zip(parts, lower.theta.values(), strict=True)])
    return flat(lower.constants().values())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("product", ["reverse", "finite_difference"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_hypergradient_is_that_of_the_optimizers_jacobian(name: str, clip: float | None, product: Any) -> None:
    made = ticked(program(OPTIMIZERS[name], Implicit(OptimizerPreconditioner(), product), clip), 3)
    lower, upper = made.problems["w"], made.problems["u"]
    theta = list(lower.theta.values())
    loss = lambda u: lower.loss(None, w=lower.module, u=lambda: u)  # noqa: E731
    point = upper.theta["x"].detach().requires_grad_()
    slope = torch.autograd.grad(loss(point), theta, create_graph=True)
    g = flat(slope).detach()
    rows = []
    for number in range(len(g)):
        move = torch.zeros_like(g)
        move[number] = 1e-6
        rows.append((stepped(made, g - move) - stepped(made, g + move)) / 2e-6)
    jacobian = torch.stack(rows, 1)
    upper_slope = flat(torch.autograd.grad(upper.loss(None, w=lower.module), theta))
    expected = -torch.autograd.grad(flat(slope), point, jacobian.T @ upper_slope)[0]
    found = made.gradient("u")["x"]
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_with_plain_sgd_it_is_the_identity_times_the_learning_rate() -> None:
    optimizer = OPTIMIZERS["sgd"]
    found = program(optimizer, Implicit(OptimizerPreconditioner())).gradient("u")["x"]
    expected = program(optimizer, Implicit(Identity(0.1))).gradient("u")["x"]
    assert torch.allclose(found, expected, rtol=1e-12)
