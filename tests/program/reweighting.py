"""A Meta-Weight-Net in small, its algorithms, and its hypergradient by double backward alone."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core import LossOutput, stop_gradient
from mlotool.hypergradient import ConjugateGradient, Exact, Identity, Implicit, Neumann
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Stream
from tests.program.small import Mlp, momentum, samples, sgd

ALGORITHMS: dict[str, Callable[[], AbstractHypergradient]] = {
    "identity": lambda: Implicit(Identity(0.1)),
    "neumann": lambda: Implicit(Neumann(4, 0.02)),
    "cg": lambda: Implicit(ConjugateGradient(4, 1e-8, damping=10.0)),
    "exact": lambda: Implicit(Exact(damping=10.0)),
    "finite_difference": lambda: Implicit(Identity(0.1), "finite_difference"),
    "finite_difference_cg": lambda: Implicit(ConjugateGradient(4, 1e-8, damping=10.0), "finite_difference"),
    "fresh": lambda: Implicit(Neumann(4, 0.1), batch="fresh"),
}
FD = ALGORITHMS["finite_difference"]
REVERSE = ALGORITHMS["identity"]
GRAPH = Graph({"weigher": ["model"]}, {"model": ["weigher"]})

Loss = Callable[..., Tensor | LossOutput]


def sample_losses(batch: Tensor, model: Any) -> Tensor:
    return (model(batch) - batch.sum(1)) ** 2


def weighted(batch: Tensor, *, model: Any, weigher: Any) -> Tensor:
    """Meta-Weight-Net: the weights are functions of the losses, through which no gradient passes."""
    losses = sample_losses(batch, model)
    weights = torch.sigmoid(weigher(stop_gradient(losses)[:, None]))
    return (weights * losses).mean()


def weighted_by_plain_detach(batch: Tensor, *, model: Any, weigher: Any) -> Tensor:
    losses = sample_losses(batch, model)
    return (torch.sigmoid(weigher(losses.detach()[:, None])) * losses).mean()


def clean(batch: Tensor, *, model: Any) -> Tensor:
    return sample_losses(batch, model).mean()


def reweighting(
    make: Callable[[], AbstractHypergradient],
    model: nn.Module | None = None,
    weigher: nn.Module | None = None,
    *,
    lower: Loss = weighted,
    upper: Loss = clean,
    upper_roles: Mapping[str, str] | None = None,
    **settings: Any,
) -> Program:
    """Return a Meta-Weight-Net in small; `settings` go to both problems."""
    return Program(
        [
            Problem(
                "model",
                Mlp() if model is None else model,
                lower,
                roles={"model": "model", "weigher": "weigher"},
                hypergradient=make(),
                **{"stream": Stream(samples(8, 1), 4, seed=1), "optimizer": momentum, **settings},
            ),
            Problem(
                "weigher",
                Mlp(num_inputs=1, seed=1) if weigher is None else weigher,
                upper,
                roles=upper_roles or {"model": "model"},
                **{"stream": Stream(samples(8, 2), 4, seed=2), "optimizer": sgd, **settings},
            ),
        ],
        GRAPH,
    )


def flat(gradient: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in gradient.values()])


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    return float((flat(found) - flat(expected)).norm() / flat(expected).norm())


def by_torch(program: Program, step_size: float = 0.1) -> dict[str, Tensor]:
    """Return the one-step hypergradient `direct - step_size * d<v, dC_l/dtheta>/dlambda` by double backward alone.

    The modules are called themselves, so tied and frozen parameters are PyTorch's business.
    """
    model, weigher = (program.problems[name].module for name in ("model", "weigher"))
    batches = [program.problems[name].stream.last() for name in ("model", "weigher")]
    theta = [tensor for tensor in model.parameters() if tensor.requires_grad]
    names = [name for name, tensor in weigher.named_parameters() if tensor.requires_grad]
    over = [dict(weigher.named_parameters())[name] for name in names]
    roles = {"model": model, "weigher": weigher}
    upper = program.problems["weigher"]
    loss = upper.loss(batches[1], **{role: roles[player.problem] for role, player in upper.roles.items()})
    v = torch.autograd.grad(loss, theta, retain_graph=True, materialize_grads=True, allow_unused=True)
    direct = torch.autograd.grad(loss, over, allow_unused=True, materialize_grads=True)
    lower = program.problems["model"].loss(batches[0], **roles)
    slope = torch.autograd.grad(lower, theta, create_graph=True, allow_unused=True, materialize_grads=True)
    inner = sum((a * b).sum() for a, b in zip(slope, v, strict=True))
    cross = torch.autograd.grad(inner, over, allow_unused=True, materialize_grads=True)
    return {name: a - step_size * b for name, a, b in zip(names, direct, cross, strict=True)}
