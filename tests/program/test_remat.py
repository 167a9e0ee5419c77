"""The setting `remat` of a problem: programs with it and without it, in every algorithm and beside other settings."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mlotool import Graph, Problem, Program, Stream, stop_gradient
from mlotool.hypergradient import (
    KFAC,
    SABA,
    ConjugateGradient,
    EvolutionStrategies,
    Exact,
    Identity,
    Implicit,
    Nystrom,
    OptimizerPreconditioner,
    Penalty,
    Unrolled,
)
from tests.program.small import Mlp, adam, assert_resumes, momentum, run_ticks, sgd

WIDTH = 4


class Block(nn.Module):
    """A residual block that counts how often it is evaluated."""

    def __init__(self, norm: str | None = "layer", dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, None: nn.Identity}[norm](WIDTH)
        self.attention = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.norm(x)
        return x + self.dropout(self.down(torch.tanh(self.up(y * self.attention(y)))))


class Net(nn.Module):
    def __init__(self, num_blocks: int = 2, is_shared: bool = False, **settings: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block(**settings) for _ in range(num_blocks))
        if is_shared:
            self.blocks.append(self.blocks[0])

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x))


def data(seed: int, size: int = 20, num_tasks: int | None = None) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shape = () if num_tasks is None else (5,)
    return [
        {
            "input": torch.randn(*shape, 3, generator=generator, dtype=torch.float64),
            "target": torch.randint(2, shape, generator=generator),
        }
        for _ in range(size)
    ]


def lower_loss(batch: Mapping[str, Tensor], *, model: Any, weigher: Any) -> Tensor:
    losses = cross_entropy(model(batch["input"]), batch["target"], reduction="none")
    return (torch.sigmoid(weigher(stop_gradient(losses)[:, None])) * losses).mean()


def upper_loss(batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
    return cross_entropy(model(batch["input"]), batch["target"])


def bilevel(
    remat: Any,
    hypergradient: Any = None,
    net: Mapping[str, Any] | None = None,
    lower: Mapping[str, Any] | None = None,
    role: str | Mapping[str, str] = "model",
) -> Program:
    torch.manual_seed(0)
    given = {"optimizer": momentum, **(lower or {})}
    num_tasks = given.get("tasks")
    batch_size = 8 if num_tasks is None else num_tasks
    low = Problem(
        "model",
        Net(**(net or {})).double(),
        lower_loss,
        roles={"model": "model", "weigher": "weigher"},
        stream=Stream(data(1, num_tasks=num_tasks), batch_size, seed=1, shuffle=False, drop_last=True),
        hypergradient=hypergradient or Implicit(Identity(), "finite_difference"),
        remat=remat,
        **given,
    )
    high = Problem(
        "weigher",
        Mlp(num_inputs=1),
        upper_loss,
        roles={"model": role},
        stream=Stream(data(2, num_tasks=num_tasks), batch_size, seed=2),
        optimizer=sgd,
    )
    return Program([low, high], Graph({"weigher": ["model"]}, {"model": ["weigher"]}))


def theta_of(made: Program) -> list[Tensor]:
    return [each.detach() for problem in made.problems.values() for each in problem.theta.values()]


def trained(made: Program, num_ticks: int = 2) -> list[Tensor]:
    run_ticks(made, num_ticks)
    return [each.clone() for each in [*theta_of(made), *made.problems["model"].module.buffers()]]


def assert_close(ours: list[Tensor], its: list[Tensor], tolerance: float = 1e-12) -> None:
    for mine, other in zip(ours, its, strict=True):
        assert torch.allclose(mine, other, rtol=tolerance, atol=tolerance)


def num_calls(made: Program) -> int:
    return sum(each.calls for each in made.problems["model"].module.modules() if isinstance(each, Block))


ALGORITHMS: dict[str, dict[str, Any]] = {
    "cg": {"hypergradient": Implicit(ConjugateGradient(3))},
    "differences": {"hypergradient": Implicit(ConjugateGradient(2), "finite_difference")},
    "forward": {"hypergradient": Implicit(ConjugateGradient(3), "forward")},
    "exact": {"hypergradient": Implicit(Exact(damping=0.1)), "net": {"num_blocks": 1}},
    "nystrom": {"hypergradient": Implicit(Nystrom(rank=2))},
    "sama": {"hypergradient": Implicit(OptimizerPreconditioner(), "finite_difference"), "lower": {"optimizer": adam}},
    "kfac": {"hypergradient": Implicit(KFAC(damping=0.1)), "net": {"norm": None}},
    "gauss-newton": {"hypergradient": Implicit(KFAC(damping=0.1, kind="ggn"))},
    "unrolled": {"hypergradient": Unrolled(), "lower": {"unroll_steps": 2}},
    "unrolled again": {"hypergradient": Unrolled(remat=True), "lower": {"unroll_steps": 2}},
    "unrolled kept": {"hypergradient": Unrolled(remat=False), "lower": {"unroll_steps": 2}},
    "penalty": {"hypergradient": Penalty(multiplier=10.0, num_steps=2, step_size=0.1)},
    "saba": {"hypergradient": SABA(0.1), "lower": {"optimizer": sgd}},
    "evolution": {"hypergradient": EvolutionStrategies(num_pairs=2), "lower": {"unroll_steps": 2}},
}
BESIDE: dict[str, dict[str, Any]] = {
    "dropout": {"net": {"dropout": 0.3}},
    "dropout, by reverse mode": {"net": {"dropout": 0.3}, "hypergradient": Implicit(ConjugateGradient(2))},
    "batch norm": {"net": {"norm": "batch"}},
    "batch norm, by reverse mode": {"net": {"norm": "batch"}, "hypergradient": Implicit(ConjugateGradient(2))},
    "eval mode": {"net": {"norm": "batch", "dropout": 0.3}, "role": {"problem": "model", "mode": "eval"}},
    "a shared block": {"net": {"is_shared": True}, "hypergradient": Implicit(ConjugateGradient(2))},
    "accumulation": {"lower": {"accumulate_batches": 2}},
    "clipping": {"lower": {"gradient_clip_norm": 0.05}},
    "reset": {"lower": {"reset_to": "initial"}},
    "look-ahead": {"lower": {"unroll_steps": 2, "roll_back": True}, "hypergradient": Unrolled()},
    "line search": {"lower": {"optimizer": partial(torch.optim.LBFGS, max_iter=2)}},
    "bf16": {"lower": {"precision": "bf16"}},
    "fp16": {"lower": {"precision": "fp16"}},
    "tasks, cg": {"net": {"dropout": 0.3}, "lower": {"tasks": 3}, "hypergradient": Implicit(ConjugateGradient(2))},
    "tasks, differences": {"net": {"dropout": 0.3}, "lower": {"tasks": 3}},
    "tasks, unrolled": {"net": {"dropout": 0.3}, "lower": {"tasks": 3}, "hypergradient": Unrolled()},
}
MORE = ("exact", "gauss-newton", "tasks, cg", "tasks, differences", "line search", "fp16")
"""Beside others of their kind: they take longest."""

# What Exact solves is ill-conditioned.
TOLERANCES = {"exact": 1e-10, "bf16": 1e-3, "fp16": 1e-3}


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:.*solve at problem")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in MORE else name for name in (*ALGORITHMS, *BESIDE)]
)
def test_training_is_the_same(name: str) -> None:
    if name == "kfac":
        pytest.importorskip("curvlinops")
    given = {**ALGORITHMS, **BESIDE}[name]
    plain, ours = bilevel(None, **given), bilevel(["blocks.*"], **given)
    num_ticks = 1 if name == "exact" else 2
    assert_close(trained(ours, num_ticks), trained(plain, num_ticks), TOLERANCES.get(name, 1e-12))
    # The noise of evolution strategies needs no derivative but that of the steps.
    assert num_calls(ours) > num_calls(plain)


@pytest.mark.filterwarnings("ignore:.*solve at problem")
@pytest.mark.parametrize("name", ["cg", "unrolled"])
def test_a_block_inside_a_block(name: str) -> None:
    given = {**ALGORITHMS[name], "net": {"dropout": 0.3}}
    plain, ours = bilevel(None, **given), bilevel(["blocks.*.attention", "blocks.*"], **given)
    assert_close(trained(ours), trained(plain))
    # In the evaluation for the outer block's pullback it is such a block as well, which its own pullback evaluates.
    inside, evaluations = ours.problems["model"].module.blocks[0].attention[0], []
    inside.register_forward_hook(lambda *_: evaluations.append(inside.weight.requires_grad))
    x = torch.ones(2, 3, dtype=torch.float64)
    torch.autograd.grad(ours.problems["model"].live(None, None)(x).sum(), [inside.weight])
    assert evaluations == [False, False, True]


def test_methods_and_other_parameters_of_a_role() -> None:
    """`role.method(...)` and `role.at(...)` evaluate the same blocks by `remat`."""

    def loss(batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
        moved = {name: 0.9 * each for name, each in model.named_parameters()}
        return (
            model.at(moved).method("features", batch["input"]).square().mean()
            + model.method("features", batch["input"]).square().mean()
        )

    found = []
    for remat in (["blocks.*"], None):
        torch.manual_seed(0)
        settings = {"roles": {"model": "model"}, "stream": Stream(data(1), 8), "optimizer": sgd}
        program = Program([Problem("model", Net().double(), loss, remat=remat, **settings)], Graph())
        found.append((trained(program, 1), num_calls(program)))
    assert_close(found[0][0], found[1][0])
    assert found[0][1] == 2 * found[1][1]


def test_a_saved_program_goes_on_bit_by_bit() -> None:
    assert_resumes(lambda: bilevel(["blocks.*"], net={"norm": "batch"}), num_ticks=3, num_more=3)


def test_hooks_of_a_block_run_once_and_change_what_it_returns() -> None:
    net = Net().double()
    heard = []

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        heard.append(module)
        return 2 * output

    net.blocks[0].register_forward_hook(hook)
    net.blocks[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    x = torch.ones(2, 3, dtype=torch.float64)
    problem = Problem("model", net, upper_loss, roles={"model": "model"}, remat="auto")
    model = problem.live(None, None)
    ours = torch.autograd.grad(model(x).sum(), list(net.parameters()))
    assert heard == [net.blocks[0]]
    assert_close(list(ours), list(torch.autograd.grad(net(x).sum(), list(net.parameters()))))
