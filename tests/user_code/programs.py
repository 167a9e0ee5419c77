"""Small programs that are drawn by a number, what a user's code does to them, and the same training by plain torch."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from mlotool import Identity, Neumann

BATCH_SIZE = 8
Batch = Mapping[str, Tensor]
Transform = Callable[[Tensor], Tensor]
State = dict[str, Tensor]
"""Parameters, buffers and tensors of an optimizer by name."""


class Samples:
    """Samples of three classes, a third of which have a wrong label, so that no training ends."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target = torch.randint(3, (size,), generator=generator)
        self.input = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        self.input[:, 0] += 2 * self.target
        wrong = torch.rand(size, generator=generator) < 0.3
        self.target = torch.where(wrong, (self.target + 1) % 3, self.target)

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self.input[index], "target": self.target[index]}

    def batch(self, number: int) -> dict[str, Tensor]:
        begin = number * BATCH_SIZE % len(self)
        return {"input": self.input[begin : begin + BATCH_SIZE], "target": self.target[begin : begin + BATCH_SIZE]}


class Doubled(torch.optim.SGD):
    """An optimizer of a user's own: SGD that steps twice."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        super().step(closure)


# A large eps: where Adam divides by something small it magnifies rounding.
_ADAM = {"lr": 0.002, "weight_decay": 0.01, "eps": 1e-3}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, weight_decay=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.005, momentum=0.9, weight_decay=0.01),
    "nesterov": partial(torch.optim.SGD, lr=0.01, momentum=0.8, nesterov=True, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, **_ADAM),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True, **_ADAM),
    "adamw": partial(torch.optim.AdamW, **_ADAM),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.001, eps=1e-3, weight_decay=0.01),
    "doubled": partial(Doubled, lr=0.01, momentum=0.5, weight_decay=0.01),
}
NORMS: dict[str, Callable[[], list[nn.Module]]] = {
    "none": list,
    "bn": lambda: [nn.BatchNorm1d(8)],
    "ln": lambda: [nn.LayerNorm(8)],
    "dropout": lambda: [nn.Dropout(0.0)],
}
SOLVERS = {"identity": Identity(0.1), "neumann": Neumann(3, 0.05)}


class Case:
    """One program with the user's code around it; those of equal arguments are equal.

    Code of the user's is a list of functions that are called between ticks, and of functions of the logits.

    Args:
        number: draws the program, and what the user's code does when.
        ticks: of the whole run.
        member: of a group of runs, which differ in their start, their data and, some of them, in what happens.
        names: of actions; None draws some.
        mode: by which it runs; not all actions make sense in all modes.
    """

    def __init__(
        self, number: int, ticks: int, mode: str, *, member: int = 0, names: Sequence[str] | None = None
    ) -> None:
        from tests.user_code.actions import ACTIONS

        self.chance = chance = random.Random(number)
        self.number, self.ticks, self.mode, self.member = number, ticks, mode, member
        self.is_bilevel = chance.random() < 0.35
        self.optimizer_name, self.norm = chance.choice([*OPTIMIZERS]), chance.choice([*NORMS])
        self.has_groups, self.solver = chance.random() < 0.3, chance.choice([*SOLVERS])
        self.unroll_steps = chance.choice((2, 5, 10)) if self.is_bilevel else 1
        usable = [name for name, each in ACTIONS.items() if each.suits(mode, is_bilevel=self.is_bilevel)]
        drawn = chance.sample(usable, chance.choice((1, 1, 2, 3)))
        self.names = drawn if names is None else names
        self.norm = next((each for name in self.names if (each := ACTIONS[name].norm)), self.norm)
        self.train, self.meta = Samples(40, 10 * number + member), Samples(16, 10 * number + member + 5)
        self._set_up()
        for name in self.names:
            # What one run of a group does, the others need not do.
            self._takes_part = mode != "fused" or chance.random() < 0.6 or member == 1
            ACTIONS[name].set_up(self)

    def __str__(self) -> str:
        levels = f"two levels by {self.solver}" if self.is_bilevel else "one level"
        return f"{self.mode}, {levels}, {self.optimizer_name}, {self.norm}, {', '.join(self.names) or 'no action'}"

    def _set_up(self) -> None:
        torch.manual_seed(10 * self.number + self.member)
        first, last, act = nn.Linear(6, 8), nn.Linear(8, 3), self.chance.choice((nn.Tanh, nn.GELU))()
        self.module = nn.Sequential(first, *NORMS[self.norm](), act, last).double()
        self.weigher = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1), nn.Sigmoid()).double()
        self.optimizer: Any = None
        self.scheduler: Callable[[Any], Any] | None = None
        self.transforms: list[Transform] = []
        self.offs: dict[int, Callable[[], Any]] = {}
        self._events: list[Callable[[int], Any]] = []
        self._states: list[Callable[[int], Any]] = []

    # What actions use.

    def tick(self, after: int = 2) -> int:
        """Draw a tick: early, at any time, or late, when a run traces its steps."""
        begin, end = self.chance.choice(((2, min(60, self.ticks)), (2, self.ticks), (self.ticks // 2, self.ticks)))
        return max(after, self.chance.randrange(begin, end))

    def each(self, act: Callable[[int], Any], *, again: bool = False) -> None:
        """Call a function with the number of ticks that have been taken, before each.

        Args:
            act: the function.
            again: whether a run that goes on calls it at its first tick, as it must for what no checkpoint holds.
        """
        if self._takes_part:
            (self._states if again else self._events).append(act)

    def once(self, act: Callable[[], Any]) -> None:
        """Call a function before some tick; a run that goes on after it does not call it again."""
        tick = self.tick()
        self.each(lambda now: act() if now == tick else None)

    def during(self, on: Callable[[], Callable[[], Any]]) -> None:
        """Call a function before some tick, or the first one, and what it returns some time later, or never."""
        begin = self.chance.choice((0, self.tick()))
        end = self.chance.choice((self.ticks + 1, self.tick(begin + 1)))
        key = len(self._states)

        def look(now: int) -> None:
            if begin <= now < end and key not in self.offs:
                self.offs[key] = on()
            elif now >= end and key in self.offs:
                self.offs.pop(key)()

        self.each(look, again=True)

    def transform(self, function: Transform) -> None:
        """Let the logits pass a function: in the loss, in a module of the user's, or in a hook of torch's module."""
        where = self.chance.choice(("loss", "module", "hook"))
        if where == "loss":
            self.transforms.append(function)
        elif where == "module":
            self.module.append(Applied(function))
        else:
            self.module.register_forward_hook(lambda module, given, found: function(found))

    def parameter(self) -> Callable[[], nn.Parameter]:
        """Draw a parameter; return what looks it up."""
        place = self.chance.randrange(100)
        return lambda: [*self.module.parameters()][place % len([*self.module.parameters()])]

    # What runs use.

    def between(self, tick: int, *, is_resumed: bool = False) -> None:
        """Run the user's code before a tick; where a run goes on, but for what it had done before it stopped."""
        for act in self._states if is_resumed else (*self._states, *self._events):
            act(tick)

    def close(self) -> None:
        """Take back what would outlive the run: hooks for all modules and optimizers."""
        while self.offs:
            self.offs.popitem()[1]()

    def make_optimizer(self, parameters: Any) -> Any:
        parameters, make = [*parameters], OPTIMIZERS[self.optimizer_name]
        if self.has_groups:
            parameters = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.002, "weight_decay": 0.02}]
        self.optimizer = make(parameters)
        for group in self.optimizer.param_groups:
            # At larger rates many a network magnifies rounding: no two ways to train it agree.
            group["lr"] *= 0.25
        return self.optimizer

    def make_upper_optimizer(self, parameters: Any) -> Any:
        return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)

    def loss(self) -> Callable[..., Tensor]:
        """Return the loss of the network."""
        transforms = self.transforms

        def single(batch: Batch, *, model: Any) -> Tensor:
            logits = model(batch["input"])
            for each in transforms:
                logits = each(logits)
            return functional.cross_entropy(logits, batch["target"])

        def weighted(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
            logits = model(batch["input"])
            for each in transforms:
                logits = each(logits)
            losses = functional.cross_entropy(logits, batch["target"], reduction="none")
            return (weigher(losses.detach()[:, None]).squeeze(1) * losses).mean()

        return weighted if self.is_bilevel else single

    def state(self) -> State:
        """Return copies of all parameters, buffers and tensors of the optimizer."""
        found = dict(self.module.state_dict()) | {f"weigher.{k}": v for k, v in self.weigher.state_dict().items()}
        for name, parameter in self.module.named_parameters():
            kept = self.optimizer.state.get(parameter, {})
            found |= {f"{name}/{key}": each for key, each in kept.items() if isinstance(each, Tensor)}
        return {name: each.detach().clone() for name, each in found.items()}


class Applied(nn.Module):
    """A module of a user's that is a function."""

    def __init__(self, function: Transform) -> None:
        super().__init__()
        self.function = function

    def forward(self, logits: Tensor) -> Tensor:
        return self.function(logits)


def by_hand(case: Case) -> State:
    """Train as one writes it down in torch."""
    optimizer = case.make_optimizer(each for each in case.module.parameters() if each.requires_grad)
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    upper = case.make_upper_optimizer(case.weigher.parameters())
    lower_loss = case.loss()
    roles = {"model": case.module} | ({"weigher": case.weigher} if case.is_bilevel else {})
    case.between(0)
    for tick in range(case.ticks):
        batch = case.train.batch(tick)
        case.optimizer.zero_grad()
        lower_loss(batch, **roles).backward()
        case.optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if case.is_bilevel and (tick + 1) % case.unroll_steps == 0:
            meta = case.meta.batch(tick // case.unroll_steps)
            slopes = hypergradient(case, partial(lower_loss, batch), meta)
            for parameter, slope in zip(case.weigher.parameters(), slopes, strict=True):
                parameter.grad = slope
            upper.step()
        case.between(tick + 1)
    case.close()
    return case.state()


def hypergradient(case: Case, lower: Callable[..., Tensor], meta: Batch) -> list[Tensor]:
    """Return `-M^T q` with `q` by the case's solver from `v`, by products of double backward."""
    theta = {
        name: each.detach().clone().requires_grad_()
        for name, each in case.module.named_parameters()
        if each.requires_grad
    }
    values, above = [*theta.values()], [*case.weigher.parameters()]

    def model(given: Tensor) -> Any:
        # With buffers of its own: only training moves them.
        buffers = {name: each.clone() for name, each in case.module.named_buffers()}
        return functional_call(case.module, {**theta, **buffers}, (given,))

    def flat(value: Tensor, vector: Tensor | None = None, **named: Any) -> Tensor:
        found = torch.autograd.grad(value, values, vector, allow_unused=True, **named)
        parts = [torch.zeros_like(x) if y is None else y for x, y in zip(values, found, strict=True)]
        return torch.cat([each.reshape(-1) for each in parts])

    upper = functional.cross_entropy(model(meta["input"]), meta["target"])
    slope = flat(lower(model=model, weigher=case.weigher), create_graph=True)
    q = _solved(case.solver, lambda vector: flat(slope, vector, retain_graph=True), flat(upper))
    return [-each for each in torch.autograd.grad(slope, above, q)]


def _solved(solver: str, product: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    if solver == "identity":
        return 0.1 * v
    term = total = v
    for _ in range(2):
        term = term - 0.05 * product(term)
        total = total + term
    return 0.05 * total
