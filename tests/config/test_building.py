from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from mlotool import Graph, Identity, Implicit, Problem, Program, Schedule, Stream
from mlotool.config import build, compose, derived_seed
from mlotool.config.instantiate import optimizer_factory, scheduler_factory
from mlotool.config.user_data import limited
from mlotool.losses import cross_entropy, reweighted_cross_entropy
from mlotool.models import MLP, WeightNet

Change = Callable[[dict[str, Any]], DictConfig]
TORCH = "torch.optim.lr_scheduler"


def _weights(program: Program) -> list[torch.Tensor]:
    return [tensor for problem in program.problems.values() for tensor in problem.theta.values()]


def test_a_recipe_becomes_a_program(changed: Change) -> None:
    built = build(changed({"debug.limit_warmup_steps": 0}))
    assert set(built.program.problems) == {"classifier", "reweight"}
    problem = built.program.problems["classifier"]
    assert isinstance(problem.module, MLP)
    assert problem.roles["weigher"].problem == "reweight"
    assert built.program.problems["reweight"].hypergradient is None
    analysis = built.analyses["weights"]
    assert (analysis.split, analysis.batch_size, analysis.roles["model"]) == ("train", 500, "classifier")
    results = Schedule(built.program).tick()
    assert set(results) == {"classifier", "reweight"}


def test_the_seed_decides_and_each_problem_has_its_own(changed: Change) -> None:
    first, same, other = (build(changed({"seed": seed})).program for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(_weights(first), _weights(same), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(_weights(first), _weights(other), strict=True))
    assert derived_seed(1, "stream", "a") != derived_seed(1, "stream", "b") != derived_seed(2, "stream", "b")
    random = torch.random.get_rng_state()
    build(changed({}))
    assert torch.equal(random, torch.random.get_rng_state())


def test_gradients_are_traced_as_the_runner_says(changed: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = {"auto": ("eager", 2000), True: ("eager", 0), "inductor": ("inductor", 0), False: (None, 0)}
    for choice, expected in choices.items():
        program = build(changed({"runner.trace": choice})).program
        assert (program.internals.tracing.backend, program.internals.tracing.begins_at) == expected
    # Code of the user's own only where that is asked for.
    monkeypatch.setattr("mlotool.program.guard.is_of_user", lambda *code: True)
    assert build(changed({"runner.trace": "auto"})).program.internals.tracing.backend is None
    assert build(changed({"runner.trace": True})).program.internals.tracing.backend == "eager"


def test_another_module_does_not_move_the_others(changed: Change) -> None:
    plain = build(changed({})).program.problems["reweight"].theta
    other = build(changed({"problems.classifier.module.hidden": [7]})).program.problems["reweight"].theta
    assert all(torch.equal(plain[key], other[key]) for key in plain)


def test_a_recipe_is_a_dozen_lines_of_python(changed: Change) -> None:
    built = build(changed({"problems.classifier.unroll_steps": 2, "problems.classifier.warmup_steps": 2}))

    def seeded(name: str, make: type[torch.nn.Module], *settings: object) -> torch.nn.Module:
        torch.manual_seed(derived_seed(0, "module", name))
        return make(*settings)

    def stream(name: str, split: str) -> Stream:
        return Stream(built.data.split(split), 100, seed=derived_seed(0, "stream", name))

    lower = Problem(
        "classifier",
        seeded("classifier", MLP, (1, 8, 8), 10, (128, 128)),
        partial(reweighted_cross_entropy, normalize=False),
        roles={"model": "classifier", "weigher": "reweight"},
        stream=stream("classifier", "train"),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-3, fused=True),
        hypergradient=Implicit(Identity(), product="finite_difference"),
        unroll_steps=2,
        warmup_steps=2,
    )
    upper = Problem(
        "reweight",
        seeded("reweight", WeightNet, 100),
        cross_entropy,
        roles={"model": "classifier"},
        stream=stream("reweight", "meta"),
        optimizer=partial(torch.optim.Adam, lr=1e-3, fused=True),
    )
    program = Program([lower, upper], Graph({"reweight": ["classifier"]}, {"classifier": ["reweight"]}))
    ours, theirs = (
        [{name: float(step.loss) for name, step in schedule.tick().items()} for _ in range(8)]
        for schedule in (Schedule(program), Schedule(built.program))
    )
    assert ours == theirs and any("reweight" in steps for steps in ours)


def test_debug_limits_the_samples_of_each_split() -> None:
    built = build(compose("mwn", ["debug=fast", "debug.limit_samples=30"]))
    assert [len(built.data.split(name)) for name in built.data.splits] == [30] * 4
    assert built.data.num_classes == 10
    batch = built.program.problems["classifier"].stream.next()  # type: ignore[union-attr]
    assert len(batch["input"]) == 30
    assert len(batch["target"].unique()) > 5


@pytest.mark.parametrize("has_batches", [True, False])
def test_limited_data_is_spread_over_the_whole(has_batches: bool) -> None:
    class Numbers:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            return index

    class Batches(Numbers):
        seeded = True

        def __getitems__(self, indices: list[int], seed: int | None = None) -> tuple[list[int], int | None]:
            return indices, seed

    dataset = limited(Batches() if has_batches else Numbers(), 5)
    assert [dataset[index] for index in range(len(dataset))] == [0, 3, 4, 7, 8]
    assert hasattr(dataset, "__getitems__") is has_batches
    if has_batches:
        assert dataset.__getitems__(torch.tensor([4, 0]), seed=3) == ([8, 0], 3)
        assert dataset.seeded
    with pytest.raises(IndexError):
        dataset[5]
    assert len(limited(dataset, 99)) == 5
    # One without a length is left to the check of it.
    odd = type("Odd", (), {"__len__": lambda self: None})()
    assert limited(odd, 100) is odd


@pytest.mark.parametrize("size", [200, 1000, 1001, 2000])
def test_limited_data_keeps_all_classes_where_labels_alternate(size: int) -> None:
    for period in (2, 3, 4, 5, 10, 20):
        dataset = limited([index % period for index in range(size)], 100)
        counts = [list(dataset).count(label) for label in range(period)]
        assert sum(counts) == 100
        assert min(counts) >= 100 // period // 2


def test_an_optimizer_gets_tuples_and_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    node = {"_target_": "torch.optim.Adam", "lr": 0.1, "betas": [0.8, 0.9]}
    optimizer = optimizer_factory("problems.a.optimizer", node)([parameter])
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["params"][0] is parameter


@pytest.mark.parametrize(
    ("target", "settings", "dtype", "expected"),
    [
        ("SGD", {}, torch.float32, True),
        ("AdamW", {}, torch.float64, True),
        ("Adam", {"foreach": True}, torch.float32, None),
        ("Adam", {}, torch.complex64, None),
        ("RMSprop", {}, torch.float32, None),
    ],
)
def test_optimizers_with_fused_kernels_use_them(
    target: str, settings: dict[str, Any], dtype: torch.dtype, expected: bool | None
) -> None:
    node = {"_target_": f"torch.optim.{target}", "lr": 0.1, **settings}
    parameter = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = optimizer_factory("problems.a.optimizer", node)([parameter])
    assert optimizer.param_groups[0].get("fused") is expected
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert float(parameter.detach()[0].real) < 1


def test_schedulers_inside_a_scheduler_share_its_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    inner = [
        {"_target_": f"{TORCH}.LinearLR", "start_factor": 0.5, "total_iters": 2},
        {"_target_": f"{TORCH}.StepLR", "step_size": 1, "gamma": 0.1},
    ]
    scheduler = scheduler_factory("key", {"_target_": f"{TORCH}.SequentialLR", "schedulers": inner, "milestones": [2]})(
        optimizer
    )
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.5, 0.75, 1.0, 0.1])
    chained = scheduler_factory("key", {"_target_": f"{TORCH}.ChainedScheduler", "schedulers": inner})
    assert chained(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)).get_last_lr() == [0.5]
