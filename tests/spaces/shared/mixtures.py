"""A mixture whose parameters have a convex problem, beside the same written with plain tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.data.splits import InMemoryTensors
from mlotool.losses import path_cross_entropy
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule, Stream
from mlotool.spaces import Operator, PathWeights, SharedSpace
from mlotool.spaces.shared.shared_space import AbstractArchitecture
from tests.programs import newton

DECAY, RATE, NUM_STEPS = 0.2, 0.3, 3


def make() -> SharedSpace:
    """A mixture of activations, then one of linear layers: linear in the parameters, so that the problem is convex."""
    activation = Operator("activation", "0", {"relu": None, "tanh": nn.Tanh, "same": nn.Identity})
    head = Operator("head", "1", {"bias": None, "plain": partial(nn.Linear, 3, 2, bias=False, dtype=torch.float64)})
    torch.manual_seed(0)
    return SharedSpace(
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(3, 2, dtype=torch.float64)),
        [activation, head],
        inputs=[{"shape": [3], "dtype": "float64"}],
        seed=1,
    )


def drawn(seed: int) -> InMemoryTensors:
    """Return two classes that overlap."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    return InMemoryTensors({"input": inputs, "target": torch.randint(2, (12,), generator=generator)})


TRAIN, META = drawn(1), drawn(2)


def decayed(batch: Any, *, model: Any, paths: Any) -> Tensor:
    """Strongly convex in the parameters of the space."""
    decay = sum(each.square().sum() for each in model.parameters())
    return path_cross_entropy(batch, model=model, paths=paths).loss + 0.5 * DECAY * decay


def start() -> tuple[Tensor, Tensor]:
    """Return the logits, (5,), and the parameters, (14,)."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator, dtype=torch.float64)
    return logits, 0.3 * torch.randn(14, generator=generator, dtype=torch.float64)


def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of activations and of layers."""
    return logits[:3].softmax(0), logits[3:].softmax(0)


Mix = Callable[[Tensor], tuple[Tensor, Tensor]]


def plain(samples: InMemoryTensors, logits: Tensor, theta: Tensor, mix: Mix = softmax) -> Tensor:
    """Return the cross-entropy of the mixture."""
    (p, h), x = mix(logits), samples.values["input"]
    z = p[0] * x.clamp_min(0) + p[1] * x.tanh() + p[2] * x
    weight, bias, other = theta[:6].reshape(2, 3), theta[6:8], theta[8:].reshape(2, 3)
    scores = h[0] * (z @ weight.T + bias) + h[1] * (z @ other.T)
    return (scores.logsumexp(1) - scores[torch.arange(12), samples.values["target"]]).mean()


def lower(logits: Tensor, theta: Tensor, mix: Mix = softmax) -> Tensor:
    return plain(TRAIN, logits, theta, mix) + 0.5 * DECAY * theta.square().sum()


def upper(logits: Tensor, theta: Tensor, mix: Mix = softmax) -> Tensor:
    return plain(META, logits, theta, mix)


def slope(logits: Tensor, theta: Tensor, mix: Mix = softmax) -> Tensor:
    return torch.func.grad(lower, 1)(logits, theta, mix)


def solved(logits: Tensor) -> Tensor:
    return newton(lambda theta: slope(logits, theta), torch.zeros(14, dtype=torch.float64)).detach()


def simulated(logits: Tensor, theta: Tensor, steps: int = NUM_STEPS, mix: Mix = softmax) -> Tensor:
    for _ in range(steps):
        theta = theta - RATE * slope(logits, theta, mix)
    return theta


def differences(function: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """Return the gradient by central differences, with the error of fourth order."""
    found = []
    for unit in torch.eye(len(logits), dtype=torch.float64):
        near, far = ((function(logits + h * unit) - function(logits - h * unit)) / (2 * h) for h in (1e-3, 2e-3))
        found.append((4 * near - far) / 3)
    return torch.stack(found)


def program(
    hypergradient: AbstractHypergradient,
    theta: Tensor,
    *,
    lower_steps: int = 1,
    architecture: Callable[..., AbstractArchitecture] = PathWeights,
    lower_loss: Callable[..., Any] = decayed,
    upper_loss: Callable[..., Any] = path_cross_entropy,
) -> Program:
    """Return the problems at these parameters; a step of the upper one is its gradient."""
    logits, _ = start()
    space, weights = make(), architecture(make).double()
    with torch.no_grad():
        nn.utils.vector_to_parameters(theta, space.parameters())
        nn.utils.vector_to_parameters(logits, weights.parameters())
    names = [name for name, _ in space.named_parameters()]
    assert names == ["1.weight", "1.bias", "1@plain.weight"]
    roles = {"model": "model", "paths": "paths"}
    how = [
        {"roles": roles, "stream": Stream(data, 12, shuffle=False), "optimizer": partial(torch.optim.SGD, lr=rate)}
        for data, rate in ((TRAIN, RATE), (META, 1.0))
    ]
    model = Problem("model", space, lower_loss, unroll_steps=lower_steps, hypergradient=hypergradient, **how[0])
    paths = Problem("paths", weights, upper_loss, **how[1])
    return Program([model, paths], Graph({"paths": ["model"]}, {"model": ["paths"]}))


def gradient(hypergradient: AbstractHypergradient, theta: Tensor, num_pullbacks: int = 1, **settings: Any) -> Tensor:
    """Return the gradient of the logits, of the last of some pullbacks."""
    made = program(hypergradient, theta, **settings)
    for _ in range(num_pullbacks):
        found = made.gradient("paths")
    return torch.cat([*found.values()])


def stepped(hypergradient: AbstractHypergradient, **settings: Any) -> Tensor:
    """Return the gradient after steps of the lower problem that the program took itself."""
    made = program(hypergradient, start()[1], lower_steps=NUM_STEPS, **settings)
    schedule = Schedule(made)
    for _ in range(NUM_STEPS):
        schedule.tick()
    assert made.problems["paths"].optimizer is not None
    moved = nn.utils.parameters_to_vector(made.problems["paths"].module.parameters()).detach()
    return start()[0] - moved


class Dense:
    """Derivatives of the plain functions at a point.

    Args:
        logits: of the candidates.
        theta: of the space.
        mix: weights of the candidates from logits.
    """

    def __init__(self, logits: Tensor, theta: Tensor, mix: Mix = softmax) -> None:
        def slope(logits: Tensor, theta: Tensor) -> Tensor:
            return torch.func.grad(lower, 1)(logits, theta, mix)

        self.direct = torch.func.grad(upper, 0)(logits, theta, mix)
        self.v = torch.func.grad(upper, 1)(logits, theta, mix)
        self.hessian = torch.func.jacfwd(slope, 1)(logits, theta)
        self.cross = torch.func.jacfwd(slope, 0)(logits, theta)

    def through(self, inverse: Tensor) -> Tensor:
        """Return the gradient with a matrix in the place of `H^-1`."""
        return self.direct - self.cross.T @ inverse @ self.v
