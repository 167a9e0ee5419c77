from collections.abc import Callable
from functools import partial
from pathlib import Path
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
from tests.config.conftest import message_of

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


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("auto", ("eager", 2000)), (True, ("eager", 0)), ("inductor", ("inductor", 0)), (False, (None, 0))],
)
def test_gradients_are_traced_as_the_runner_says(changed: Change, choice: Any, expected: Any) -> None:
    program = build(changed({"runner.trace": choice})).program
    assert (program.trace, program.trace_from) == expected


def test_code_of_the_users_own_is_traced_only_where_that_is_asked_for(
    changed: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlotool.program.guard.is_of_user", lambda *code: True)
    assert build(changed({"runner.trace": "auto"})).program.trace is None
    assert build(changed({"runner.trace": True})).program.trace == "eager"


def test_another_module_does_not_move_the_others(changed: Change) -> None:
    plain = build(changed({})).program.problems["reweight"].theta
    other = build(changed({"problems.classifier.module.hidden": [7]})).program.problems["reweight"].theta
    assert all(torch.equal(plain[key], other[key]) for key in plain)


def test_the_recipe_is_a_dozen_lines_of_python(changed: Change) -> None:
    config = changed(
        {
            "problems.reweight.optimizer": {"_target_": "torch.optim.Adam", "lr": 1e-3},
            "problems.classifier.optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
            "problems.classifier.unroll_steps": 2,
            "problems.classifier.warmup_steps": 0,
            "problems.classifier.module.hidden": [16],
            "hypergradient": {
                "_target_": "mlotool.hypergradient.Implicit",
                "solver": {"_target_": "mlotool.hypergradient.Identity", "step_size": 0.1},
            },
        }
    )
    built = build(config)
    torch.manual_seed(derived_seed(config.seed, "module", "classifier"))
    module = MLP([1, 8, 8], 10, hidden=[16])
    torch.manual_seed(derived_seed(config.seed, "module", "reweight"))
    weigher = WeightNet(config.problems.reweight.module.hidden)
    streams = {
        name: Stream(
            built.data.split(split),
            config.problems[name].stream.batch_size,
            seed=derived_seed(config.seed, "stream", name),
        )
        for name, split in {"classifier": "train", "reweight": "meta"}.items()
    }
    normalize = config.problems.classifier.loss.get("normalize", True)
    lower = Problem(
        "classifier",
        module,
        partial(reweighted_cross_entropy, normalize=normalize),
        roles={"model": "classifier", "weigher": "reweight"},
        stream=streams["classifier"],
        optimizer=partial(torch.optim.SGD, lr=0.1, fused=True),
        hypergradient=Implicit(Identity(0.1)),
        unroll_steps=2,
    )
    upper = Problem(
        "reweight",
        weigher,
        cross_entropy,
        roles={"model": "classifier"},
        stream=streams["reweight"],
        optimizer=partial(torch.optim.Adam, lr=1e-3, fused=True),
    )
    program = Program([lower, upper], Graph({"reweight": ["classifier"]}, {"classifier": ["reweight"]}))
    for each in (program, built.program):
        schedule = Schedule(each)
        for _ in range(6):
            schedule.tick()
    for name in ("classifier", "reweight"):
        ours, theirs = program.problems[name].theta, built.program.problems[name].theta
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_each_solution_gets_a_hypergradient_of_its_own(changed: Change) -> None:
    own = {"_target_": "mlotool.hypergradient.FirstOrder"}
    built = build(changed({"problems.classifier.hypergradient": own}))
    assert type(built.program.problems["classifier"].hypergradient).__name__ == "FirstOrder"
    first, second = (build(changed({})).program.problems["classifier"].hypergradient for _ in range(2))
    assert first is not second


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


@pytest.mark.parametrize("period", [2, 3, 4, 5, 10, 20])
@pytest.mark.parametrize("size", [200, 1000, 1001, 2000])
def test_limited_data_keeps_all_classes_where_labels_alternate(size: int, period: int) -> None:
    limit = 100
    dataset = limited([index % period for index in range(size)], limit)
    counts = [list(dataset).count(label) for label in range(period)]
    assert sum(counts) == limit
    assert min(counts) >= limit // period // 2


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
        ("SGD", {"fused": False}, torch.float32, False),
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


def test_a_scheduler_and_nested_modules_from_a_recipe(changed: Change) -> None:
    layers = [
        {"_target_": "torch.nn.Flatten"},
        {"_target_": "torch.nn.Linear", "in_features": 64, "out_features": 10},
    ]
    config = changed(
        {
            "problems.classifier.module": {"_target_": "torch.nn.Sequential", "_args_": layers},
            "problems.classifier.scheduler": {"_target_": f"{TORCH}.MultiStepLR", "milestones": [1], "gamma": 0.1},
            "problems.classifier.optimizer.lr": 1.0,
        }
    )
    problem = build(config).program.problems["classifier"]
    assert [type(layer).__name__ for layer in problem.module] == ["Flatten", "Linear"]  # type: ignore[arg-type]
    assert problem.scheduler.get_last_lr() == [1.0]


BAD_VALUES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "torch": (
        {"problems.classifier.optimizer.foreach": True, "problems.classifier.optimizer.fused": True},
        ["problems.classifier.optimizer", "SGD", "`fused` and `foreach` cannot be `True` together"],
    ),
    "model": (
        {
            "problems.classifier.module": {
                "_target_": "mlotool.models.ResNet",
                "depth": 9,
                "num_classes": 10,
                "image_shape": [1, 8, 8],
            }
        },
        ["problems.classifier.module", "depth"],
    ),
    "data": ({"data.num_classes": 11}, ["data.num_classes=11", "10"]),
    "solver": ({"hypergradient.product": "revers"}, ["hypergradient.product", "Did you mean 'reverse'?"]),
    "scheduler": (
        {"problems.classifier.scheduler": {"_target_": f"{TORCH}.StepLR", "step_size": 1, "gamma": "much"}},
        ["problems.classifier.scheduler.gamma: found 'much'"],
    ),
    "signature": ({"problems.classifier.optimizer.momentun": 0.9}, ["Did you mean 'momentum'?"]),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_what_a_target_refuses_names_the_key(name: str, changed: Change) -> None:
    changes, parts = BAD_VALUES[name]
    message = message_of(build, changed(changes))
    assert all(part in message for part in parts), message


def test_an_own_data_object_is_limited_as_well(tmp_path: Path) -> None:
    built = build(compose("plain", ["debug.limit_samples=20", "problems.classifier.stream.batch_size=7"]))
    assert built.program.problems["classifier"].stream.batch_size == 7  # type: ignore[union-attr]
    assert len(built.data.split("test")) == 20


@pytest.mark.parametrize("length", [None, -3, 3.5])
def test_a_limit_leaves_a_data_set_without_a_length_to_the_check_of_it(length: object) -> None:
    class Odd:
        def __len__(self) -> int:
            return length  # type: ignore[return-value]

    odd = Odd()
    assert limited(odd, 100) is odd
