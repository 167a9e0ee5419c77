"""Members of a stack compute what they compute alone, in float64, whatever differs between them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mlotool import ConjugateGradient, Graph, Implicit, LossOutput, Neumann, Problem, Program, Stream, Unrolled
from mlotool.hypergradient import EvolutionStrategies
from mlotool.problem.trajectory import KeepEvery
from mlotool.program import trace
from tests.fusion.members import Blobs, Compared, bilevel, compared, network, plain, plain_loss

SLOW = pytest.mark.slow
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
UNROLLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "kept": lambda k: {},
    "truncated": lambda k: {"hypergradient": Unrolled(horizon=2), "unroll_steps": 4},
    "budgeted": lambda k: {"hypergradient": Unrolled(remat="auto")},
    "clipped": lambda k: {"gradient_clip_norm": 0.5},
    "statistics": lambda k: {"module": lambda: network(nn.BatchNorm1d(8))},
    "plain steps": lambda k: {"optimizer": partial(SGD, lr=0.1)},
    "nesterov": lambda k: {"optimizer": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)},
    "adam": lambda k: {"optimizer": partial(ADAM, lr=0.01, weight_decay=0.1)},
    "amsgrad": lambda k: {"optimizer": partial(ADAMW, lr=0.01, amsgrad=True), "reset_to": "initial"},
    "rates": lambda k: {"optimizer": partial(SGD, lr=[0.01, 0.1, 0.3][k], momentum=[0.3, 0.5, 0.9][k])},
    "decays": lambda k: {"optimizer": partial(SGD, lr=0.1, weight_decay=[0.0, 0.1, 0.5][k])},
    "numbers of adam": lambda k: {
        "optimizer": partial(ADAM, lr=[0.01, 0.02, 0.03][k], betas=([0.8, 0.9, 0.7][k], 0.95), eps=[1e-8, 1e-4, 0.1][k])
    },
}
ALSO_UNROLLED = ("scheduler", "accumulated", "warm-up", "look-ahead", "from the start")


def unrolled(seed: int, **settings: Any) -> Program:
    return bilevel(seed, **{"hypergradient": Unrolled(), "unroll_steps": 3, **settings})


@SLOW
@pytest.mark.parametrize("setting", [*UNROLLS, *ALSO_UNROLLED])
def test_recorded_steps_are_arguments(setting: str) -> None:
    settings = (SETTINGS | UNROLLS)[setting]
    check(compared(lambda k: unrolled(k, **settings(k)), ticks=14))


def test_rates_that_move_are_arguments_of_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_TRACES", 2)
    # More unrolls than there may be programs.
    settings: dict[str, Any] = {"scheduler": stepping, "scheduler_interval": "step", "unroll_steps": 2}
    check(compared(lambda k: unrolled(k, **settings), 2, 6))


class Rate(nn.Module):
    """A learning rate, as its logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(-2.0))

    def forward(self) -> Tensor:
        return self.log.exp()


def shaped(seed: int, upper: Callable[[], nn.Module], optimizer: Any, **settings: Any) -> Program:
    """Return a program in which an upper problem, "shaper", gives what `settings` say."""
    torch.manual_seed(seed)
    lower = Problem(
        "classifier", network(), plain_loss, roles={"model": "classifier"}, optimizer=optimizer,
        stream=Stream(Blobs(40, seed), 8, seed=seed), hypergradient=Unrolled(), unroll_steps=2, **settings,
    )  # fmt: skip
    above = Problem(
        "shaper", upper().double(), plain_loss, roles={"model": "classifier"},
        stream=Stream(Blobs(16, seed + 9), 8, seed=seed), optimizer=partial(ADAM, lr=0.1),
    )  # fmt: skip
    return Program([above, lower], Graph({"shaper": ["classifier"]}, {"classifier": ["shaper"]}))


GIVEN: list[tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = [
    (Rate, partial(ADAM, lr=0.1), {"optimizer_roles": {"lr": "shaper"}}),
    (network, partial(SGD, lr=0.1), {"reset_to": "shaper"}),
    (Rate, partial(SGD, lr=0.1, momentum=0.9), {"optimizer_roles": {"lr": "shaper"}}),
    (network, partial(ADAMW, lr=0.1), {"reset_to": "shaper"}),
]


@pytest.mark.parametrize(
    ("upper", "optimizer", "settings"), [*GIVEN[:2], *(pytest.param(*each, marks=SLOW) for each in GIVEN[2:])]
)
def test_a_rate_or_a_start_that_another_problem_gives(upper: Any, optimizer: Any, settings: dict[str, Any]) -> None:
    check(compared(lambda k: shaped(k, upper, optimizer, **settings), 2, 6))


@pytest.mark.filterwarnings("always:problems.weights.loss")
def test_a_hypergradient_of_zero_is_found_by_each_run() -> None:
    # Plain steps have a part that moves with the weights in the derivative of their gradients alone.
    plain_steps = partial(SGD, lr=0.1)
    with pytest.warns(UserWarning, match="the hypergradient of 'weights' was exactly 0 at 3 steps") as warned:
        settings = {"hypergradient": Unrolled(second_order=False), "optimizer": plain_steps, "unroll_steps": 1}
        found = compared(lambda k: unrolled(k, **settings), ticks=5)
    check(found)
    assert len(warned) == 6


APART_STEPS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "forward mode": ("uses forward mode", lambda k: {"hypergradient": Unrolled(product="forward")}),
    "products": ("uses forward mode", lambda k: {"hypergradient": Implicit(Neumann(2, 0.1), product="forward")}),
    "graphs": ("keeps the graphs of the training steps", lambda k: {"hypergradient": Unrolled(remat=False)}),
    "checkpoints": ("recomputes training steps", lambda k: {"hypergradient": Unrolled(trajectory=KeepEvery(2))}),
    "kinds": ("differ in kind or clipping", lambda k: {"optimizer": partial([SGD, ADAM][k], lr=0.01)}),
    "flags": (
        "differ in nesterov",
        lambda k: {"optimizer": partial(SGD, lr=0.1, momentum=0.9, nesterov=[True, False][k])},
    ),
    "momentum": ("keep different tensors", lambda k: {"optimizer": partial(SGD, lr=0.1, momentum=[0.0, 0.9][k])}),
    "noise": ("random", lambda k: {"module": lambda: network(nn.Dropout(0.3))}),
    "evolution": ("does not hold for its next use", lambda k: {"hypergradient": EvolutionStrategies()}),
}


@pytest.mark.parametrize("setting", APART_STEPS)
@pytest.mark.filterwarnings("ignore:problems.classifier.hypergradient")
def test_what_is_left_to_the_plans(setting: str) -> None:
    reason, settings = APART_STEPS[setting]
    found = compared(lambda k: unrolled(k, **{"unroll_steps": 2, **settings(k)}), 2, 4)
    assert reason in found.verdicts["weights"].reason
    assert found.error < 1e-9 and not found.failures


def two_losses(batch: Mapping[str, Tensor], *, model: Any, weigher: Any, below: Any) -> LossOutput:
    logits = model(batch["input"])
    losses = nn.functional.cross_entropy(logits + below(batch["input"]), batch["target"], reduction="none")
    return LossOutput((losses * weigher(batch["target"])).mean(), {})


def test_steps_that_read_a_lower_problem_are_left_to_the_plans() -> None:
    def make(k: int) -> Program:
        # First, since it sets the seed.
        weights = unrolled(k).problems["weights"]
        classifier = Problem(
            "classifier", network(), two_losses, roles={"model": "classifier", "weigher": "weights", "below": "bottom"},
            stream=Stream(Blobs(40, k), 8, seed=k), optimizer=partial(SGD, lr=0.1), hypergradient=Unrolled(),
            unroll_steps=3,
        )  # fmt: skip
        bottom = Problem(
            "bottom", network(), plain_loss, roles={"model": "bottom"}, stream=Stream(Blobs(40, k + 50), 8, seed=k),
            optimizer=partial(SGD, lr=0.1),
        )  # fmt: skip
        graph = Graph({"weights": ["classifier"]}, {"classifier": ["weights"], "bottom": ["classifier"]})
        return Program([weights, classifier, bottom], graph)

    found = compared(make, 2, 6)
    assert "read other problems" in found.verdicts["weights"].reason
    assert found.error < 1e-9 and not found.failures


class Attending(nn.Module):
    """Attends among two tokens, into which it divides its eight features.

    Args:
        needs_weights: torch then takes plain operations, not its kernels.
        hides: the second token is none for even samples.
        options: of `nn.MultiheadAttention`.
    """

    def __init__(self, *, needs_weights: bool = False, hides: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.needs_weights, self.hides = needs_weights, hides

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (2, 4))
        hidden = torch.tensor([[False, True], [False, False]]).repeat(len(x) // 2, 1) if self.hides else None
        found, _ = self.attention(tokens, tokens, tokens, key_padding_mask=hidden, need_weights=self.needs_weights)
        return found.flatten(1)


LAYERS = {
    "dropout": lambda: Attending(dropout=0.3),
    "a mask": lambda: Attending(hides=True),
    "kernels": lambda: Attending(),
    "weights": lambda: Attending(needs_weights=True),
    "biases of keys and values": lambda: Attending(add_bias_kv=True),
    "evaluation": lambda: Attending(dropout=0.3).eval(),
}


@pytest.mark.parametrize(
    ("program", "name"),
    [
        *((plain, name) for name in [*LAYERS][:2]),
        *(pytest.param(plain, name, marks=SLOW) for name in [*LAYERS][2:]),
        *(pytest.param(bilevel, name, marks=SLOW) for name in ("kernels", "a mask", "dropout")),
    ],
)
def test_attention_is_that_of_each_run_alone(program: Any, name: str) -> None:
    found = compared(lambda number: program(number, lambda: network(LAYERS[name]())), 2, 5)
    assert not any(any(each) for each in found.failures.values())
    # Finite differences amplify rounding.
    assert found.error < (1e-12 if program is plain else 1e-9)
    draws = "dropout" in name
    assert {*found.reasons} == ({"the losses draw random numbers"} if draws else set())


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


@SLOW
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


def one_hot_loss(batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
    target = functional.one_hot(batch["target"], 3).double()
    return (model(batch["input"]).softmax(1) - target).square().mean()


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
    "targets as one-hot": lambda k: plain(k, loss=one_hot_loss),
    "smoothing": lambda k: plain(k, loss=partial(smoothed_loss, smoothing=[0.0, 0.1, 0.3][k])),
    "frozen parameters": lambda k: bilevel(k, frozen),
    "running statistics": lambda k: plain(k, lambda: network(nn.BatchNorm1d(8))),
    "running statistics below": lambda k: bilevel(k, lambda: network(nn.BatchNorm1d(8))),
    "a role in eval mode": lambda k: bilevel(k, lambda: network(nn.BatchNorm1d(8)), upper=IN_EVAL_MODE),
    "a buffer that is assigned anew": lambda k: plain(k, lambda: network(Assigning())),
    "an optimizer with noise": lambda k: plain(k, optimizer=partial(Noisy, lr=0.1)),
    "an optimizer that replaces tensors": lambda k: plain(k, optimizer=partial(Replacing, lr=[0.1, 0.2, 0.05][k])),
    "cg": lambda k: bilevel(k, hypergradient=Implicit(ConjugateGradient(2, tolerance=1e-2)), unroll_steps=2),
    "neumann": lambda k: bilevel(k, hypergradient=Implicit(Neumann(2, 0.1))),
    "solvers that decide differently": lambda k: bilevel(
        k, lambda: network(Assigning()), hypergradient=Implicit(ConjugateGradient(2, tolerance=0.2))
    ),
}

LONGER = ("cg", "neumann", "running statistics below", "a role in eval mode")
"""Beside "solvers that decide differently" and "frozen parameters"."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) if name in LONGER else name for name in PROGRAMS])
@pytest.mark.filterwarnings("ignore:The ConjugateGradient solve")
def test_members_compute_what_they_compute_alone(name: str) -> None:
    check(compared(PROGRAMS[name], 2, 5))


def test_bf16() -> None:
    def make(k: int) -> Program:
        program = plain(k, precision="bf16")
        problem = program.problems["classifier"]
        problem.module.float()
        problem.stream.to(dtype=torch.float32)
        return program

    check(compared(make), 0.02)


@pytest.mark.parametrize(
    ("program", "layer"),
    [(plain, Assigning), *(pytest.param(each, partial(nn.BatchNorm1d, 8), marks=SLOW) for each in (plain, bilevel))],
)
def test_a_leader_that_leaves_and_a_batch_of_a_new_kind(
    program: Callable[..., Program], layer: Callable[[], nn.Module]
) -> None:
    def make(k: int) -> Program:
        stream = Stream(Blobs(20, k), 6, seed=k, drop_last=False)
        return program(k, lambda: network(layer()), stream=stream)

    check(compared(make, num_members=4, ticks=9, ends={0: 3, 3: 6}))
