"""Tiny networks that are trained for some steps: as programs, and as loops in plain PyTorch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from mlotool import Graph, Problem, Program, Stream
from mlotool.hypergradient import Unrolled
from mlotool.models import Decoder
from tests.program.small import numbers
from tests.programs import Point

Vector = Sequence[Tensor]
Slopes = Sequence[Tensor | None]
Update = Callable[[Tensor, Tensor, dict[str, Tensor], int, Any], Tensor]
"""Parameter, gradient, state, the number of the step from 1 on, and learning rate in; the next parameter out."""

MOMENTUM, BETAS, EPSILON, DECAY = 0.9, (0.8, 0.9), 1e-3, 0.3
"""Of all optimizers here. With Adam's usual epsilon its first step is a sign, whose derivative is about zero."""


def sgd(theta: Tensor, slope: Tensor, state: dict[str, Tensor], number: int, lr: Any) -> Tensor:
    return theta - lr * slope


def momentum(theta: Tensor, slope: Tensor, state: dict[str, Tensor], number: int, lr: Any) -> Tensor:
    state["b"] = slope if number == 1 else MOMENTUM * state["b"] + slope
    return theta - lr * state["b"]


def adam(theta: Tensor, slope: Tensor, state: dict[str, Tensor], number: int, lr: Any) -> Tensor:
    for key, beta, value in zip("mv", BETAS, (slope, slope**2), strict=True):
        state[key] = beta * state.get(key, torch.zeros_like(theta)) + (1 - beta) * value
    first, second = (state[key] / (1 - beta**number) for key, beta in zip("mv", BETAS, strict=True))
    # The root has no derivative at zero, where the derivative of the step is that of m.
    root = torch.where(second > 0, torch.where(second > 0, second, 1.0).sqrt(), 0.0)
    return theta - lr * first / (root + EPSILON)


def adamw(theta: Tensor, slope: Tensor, state: dict[str, Tensor], number: int, lr: Any) -> Tensor:
    return adam(theta, slope, state, number, lr) - lr * DECAY * theta


UPDATES: dict[str, Update] = {"sgd": sgd, "momentum": momentum, "adam": adam, "adamw": adamw}


def call(module: nn.Module, theta: Vector, *inputs: Any) -> Any:
    """Return what a module gives at other parameters; its trainable ones are `theta`, buffers are a copy."""
    names = [name for name, each in module.named_parameters() if each.requires_grad]
    given = dict(zip(names, theta, strict=True)) | {name: each.clone() for name, each in module.named_buffers()}
    return functional_call(module, given, inputs)


@dataclass(frozen=True)
class PlainUnroll:
    """A lower problem that is trained for some steps, and a loss above of where that leads.

    The batches of a step are those that its gradient is averaged over. With `is_start` it begins at meta.
    """

    start: Vector
    loss: Callable[[Vector, Vector, Any], Tensor]
    goal: Callable[[Vector, Vector], Tensor]
    update: Update
    rate: float | Callable[[Vector], Tensor]
    batches: Sequence[Sequence[Any]]
    is_start: bool = False
    clip: float | None = None
    horizon: int | None = None

    def gradient(self, meta: Vector, *, is_second_order: bool = True) -> Tensor:
        """Return the derivative of the loss above with respect to meta, flat."""
        points = [each.detach().clone().requires_grad_() for each in meta]
        goal = self.goal(self.steps(points, is_second_order), points)
        if not goal.requires_grad:
            return torch.cat([torch.zeros_like(each).reshape(-1) for each in points])
        found = torch.autograd.grad(goal, points, materialize_grads=True)
        return torch.cat([each.reshape(-1) for each in found])

    def steps(self, meta: Vector, is_second_order: bool = True) -> list[Tensor]:
        """Return the parameters after all steps, in one graph from meta."""
        theta = [each.view_as(each) for each in (meta if self.is_start else self.start)]
        rate = self.rate(meta) if callable(self.rate) else self.rate
        states: list[dict[str, Tensor]] = [{} for _ in theta]
        for number, group in enumerate(self.batches, 1):
            if self.horizon is not None and number == len(self.batches) - self.horizon + 1:
                theta = [each.detach() for each in theta]
                states = [{key: value.detach() for key, value in each.items()} for each in states]
            slopes = self._slopes(theta, meta, group, is_second_order)
            theta = [
                x if g is None else self.update(x, g, state, number, rate)
                for x, g, state in zip(theta, slopes, states, strict=True)
            ]
        return theta

    def _slopes(self, theta: Vector, meta: Vector, group: Sequence[Any], is_second_order: bool) -> Slopes:
        at = [each if each.requires_grad else each.detach().requires_grad_() for each in theta]
        total: list[Tensor | None] = [None] * len(at)
        for batch in group:
            loss = self.loss(at, meta, batch)
            found = torch.autograd.grad(loss, at, create_graph=is_second_order, retain_graph=True, allow_unused=True)
            total = [a if b is None else b if a is None else a + b for a, b in zip(total, found, strict=True)]
        mean = [None if each is None else each / len(group) for each in total]
        if not is_second_order:
            mean = [None if each is None else each.detach() for each in mean]
        if self.clip is None:
            return mean
        norm = torch.stack([each.square().sum() for each in mean if each is not None]).sum().sqrt()
        factor = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        return [None if each is None else each * factor for each in mean]


VOCABULARY, ROWS, LENGTH = 11, 3, 5
WIDTH = 6
WAYS = ("lr", "maml", "weighting")
RATES = {"sgd": 0.5, "momentum": 0.3, "adam": 0.05, "adamw": 0.05}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=MOMENTUM),
    "adam": partial(torch.optim.Adam, betas=BETAS, eps=EPSILON),
    "adamw": partial(torch.optim.AdamW, betas=BETAS, eps=EPSILON, weight_decay=DECAY),
}
# Tokens of 8 steps, and those of the loss above.
TOKENS = torch.randint(VOCABULARY, (17, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))

ONES = torch.ones(ROWS, dtype=torch.float64)


class Rate(Point):
    """A learning rate by its logarithm."""

    def forward(self) -> Tensor:
        return self.x.exp()


class Weights(Point):
    """Some weights between 0 and 1."""

    def forward(self) -> Tensor:
        return self.x.sigmoid()


def decoder(seed: int = 0, is_double: bool = True, **settings: Any) -> nn.Module:
    """Return a block of width 8."""
    torch.manual_seed(seed)
    found = Decoder(VOCABULARY, **{"width": 8, "hidden": 10, "num_heads": 2, "num_layers": 1, **settings})
    return found.double() if is_double else found


class Mixer(nn.Module):
    """A residual block over the features of all positions, with statistics of the batch."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return x + self.dropout(self.down(torch.tanh(self.up(y))))


class Mixed(nn.Module):
    """A language model of one token, whose blocks move buffers and draw random numbers."""

    def __init__(self, dropout: float, frozen: int | None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Mixer(dropout) for _ in range(3))
        if frozen is not None:
            self.blocks[frozen].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mixed(seed: int = 0, dropout: float = 0.0, frozen: int | None = None) -> nn.Module:
    """Return three blocks with BatchNorm."""
    torch.manual_seed(seed)
    return Mixed(dropout, frozen).double()


def by_row(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of each row."""
    return cross_entropy(logits.mT, tokens[:, 1:], reduction="none").mean(1)


@dataclass(frozen=True)
class UnrolledCase:
    """What a network learns, what is learned of its training, and how.

    Args:
        way: what the problem above is: a learning rate, a start or weights of rows.
        network: from a seed to it.
        mode: of the network in the loss above; None leaves it.
        is_streamed: whether the program has a stream of its batches, one after the other.
    """

    way: str
    optimizer: str = "sgd"
    num_steps: int = 3
    network: Callable[..., nn.Module] = decoder
    accumulate: int = 1
    clip: float | None = None
    mode: str | None = None
    tasks: int | None = None
    is_autocast: bool = False
    is_streamed: bool = False

    @property
    def batches(self) -> list[Tensor]:
        if self.tasks is not None:
            return list(TOKENS[: self.num_steps * self.tasks].unflatten(0, (self.num_steps, self.tasks)))
        return list(TOKENS[: self.num_steps * self.accumulate])

    def upper(self) -> nn.Module:
        if self.way == "maml":
            return self.network(1)
        is_rate = self.way == "lr"
        return Rate(numbers(RATES[self.optimizer]).log()) if is_rate else Weights(torch.linspace(-1, 1, ROWS).double())

    def loss(self, logits: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss of the lower problem: a row has the weight of its first token."""
        return (weights[tokens[:, 0] % ROWS] * by_row(logits, tokens)).mean()

    def program(self, hypergradient: Any, remat: Any = None) -> Program:
        """Return it as a program."""
        lower = {"lr": {"optimizer_roles": {"lr": "upper"}}, "maml": {"reset_to": "upper"}, "weighting": {}}[self.way]
        roles = {"model": "model"} | ({"weights": "upper"} if self.way == "weighting" else {})

        def loss(batch: Tensor, *, model: Any, weights: Any = None) -> Tensor:
            return self.loss(model(batch[:, :-1]), ONES if weights is None else weights(), batch)

        def goal(batch: Any, *, model: Any) -> Tensor:
            return by_row(model(TOKENS[-1][:, :-1]), TOKENS[-1]).mean()

        low = Problem(
            "model",
            self.network(0),
            loss,
            roles=roles,
            optimizer=partial(OPTIMIZERS[self.optimizer], lr=RATES[self.optimizer]),
            hypergradient=hypergradient,
            remat=remat,
            accumulate_batches=self.accumulate,
            gradient_clip_norm=self.clip,
            tasks=self.tasks,
            stream=Stream(list(torch.cat(self.batches)), ROWS, shuffle=False, drop_last=False)
            if self.is_streamed
            else None,
            precision="bf16" if self.is_autocast else "fp32",
            unroll_steps=self.num_steps,
            **lower,
        )
        role = "model" if self.mode is None else {"problem": "model", "mode": self.mode}
        high = Problem("upper", self.upper(), goal, roles={"model": role}, optimizer=partial(torch.optim.SGD, lr=1.0))
        return Program([low, high], Graph({"upper": ["model"]}, {"model": ["upper"]}))

    def found(self, hypergradient: Any, remat: Any = None, seed: int = 7) -> Tensor:
        """Return the gradient of the loss above by mlotool, flat, of steps that are simulated."""
        made = self.program(hypergradient, remat)
        made.random.manual_seed(seed)
        return torch.cat([each.reshape(-1) for each in made.gradient("upper", {"model": self.batches}).values()])

    def expected(self, *, is_second_order: bool = True, horizon: int | None = None, seed: int = 7) -> Tensor:
        """Return it by one graph through all steps, flat; the mean over tasks."""
        steps = [self.batches[i : i + self.accumulate] for i in range(0, len(self.batches), self.accumulate)]
        of_tasks = (
            [steps] if self.tasks is None else [[[step[0][task]] for step in steps] for task in range(self.tasks)]
        )
        meta = [each.detach() for each in self.upper().parameters() if each.requires_grad]
        torch.manual_seed(seed)
        found = [self._plain(each, horizon).gradient(meta, is_second_order=is_second_order) for each in of_tasks]
        return torch.stack(found).mean(0)

    def _plain(self, steps: Sequence[Sequence[Tensor]], horizon: int | None) -> PlainUnroll:
        state = torch.get_rng_state()
        network = self.network(0)
        torch.set_rng_state(state)

        def loss(theta: Vector, meta: Vector, tokens: Tensor) -> Tensor:
            weights = meta[0].sigmoid() if self.way == "weighting" else ONES
            with torch.autocast("cpu", torch.bfloat16, enabled=self.is_autocast):
                return self.loss(call(network, theta, tokens[:, :-1]), weights, tokens)

        def goal(theta: Vector, meta: Vector) -> Tensor:
            network.train(self.mode != "eval")
            return by_row(call(network, theta, TOKENS[-1][:, :-1]), TOKENS[-1]).mean()

        return PlainUnroll(
            [each.detach() for each in network.parameters() if each.requires_grad],
            loss,
            goal,
            UPDATES[self.optimizer],
            (lambda meta: meta[0].exp()) if self.way == "lr" else RATES[self.optimizer],
            steps,
            is_start=self.way == "maml",
            clip=self.clip,
            horizon=horizon,
        )


def parameters_of(problem: Problem) -> Tensor:
    """Return the trained parameters of a problem, flat."""
    return torch.cat([each.detach().reshape(-1) for each in problem.theta.values()])


BOTH = {"reverse": Unrolled(), "forward": Unrolled(product="forward")}
REMAT: dict[str, Any] = {"plain": None, "remat": ["blocks.*"]}
