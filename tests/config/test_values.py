"""Numbers that no run can use are found before one begins, all at once."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from mlotool.config import check, compose, trusted
from mlotool.config.check_values import nan_faults
from mlotool.config.composition import plain
from tests.config.conftest import message_of

Change = Callable[[dict[str, Any]], DictConfig]
OPTIMIZER, SCHEDULER = "problems.classifier.optimizer", "problems.classifier.scheduler"


def scheduler(name: str, **settings: Any) -> dict[str, Any]:
    return {SCHEDULER: {"_target_": f"torch.optim.lr_scheduler.{name}", **settings}}


OUT_OF_RANGE: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({f"{OPTIMIZER}.lr": -0.1}, f"{OPTIMIZER}.lr: found -0.1; expected a number of at least 0"),
    "NaN": ({f"{OPTIMIZER}.lr": math.nan}, f"{OPTIMIZER}.lr: found nan"),
    "infinite": ({f"{OPTIMIZER}.lr": math.inf}, f"{OPTIMIZER}.lr: found inf"),
    "decay": ({f"{OPTIMIZER}.weight_decay": -1e-3}, f"{OPTIMIZER}.weight_decay: found -0.001"),
    "momentum": (
        {f"{OPTIMIZER}.momentum": 1.0},
        f"{OPTIMIZER}.momentum: found 1.0; expected a number of at least 0 and",
    ),
    "betas": (
        {OPTIMIZER: {"_target_": "torch.optim.Adam", "betas": [0.9, 1.5]}},
        f"{OPTIMIZER}.betas: found [0.9, 1.5]; expected a list of numbers of at least 0 and less than 1",
    ),
    "eps": ({OPTIMIZER: {"_target_": "torch.optim.Adam", "eps": -1.0}}, f"{OPTIMIZER}.eps: found -1.0"),
    "group": ({f"{OPTIMIZER}.groups": [{"match": "*", "lr": -1.0}]}, f"{OPTIMIZER}.groups[0].lr: found -1.0"),
    "step_size": (scheduler("StepLR", step_size=0), f"{SCHEDULER}.step_size: found 0; expected a whole number of at"),
    "T_max": (scheduler("CosineAnnealingLR", T_max=0), f"{SCHEDULER}.T_max: found 0"),
    "milestones": (scheduler("MultiStepLR", milestones=[20, 10]), f"{SCHEDULER}.milestones: found [20, 10]"),
    "inner": (
        scheduler("ChainedScheduler", schedulers=[{"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": -1}]),
        f"{SCHEDULER}.schedulers[0].step_size: found -1",
    ),
    "label noise": ({"data.label_noise": {"kind": "flip", "rate": 1.5}}, "data.label_noise.rate: found 1.5"),
    "imbalance": ({"data.imbalance_factor": 0.5}, "data.imbalance_factor: found 0.5"),
    "size": ({"data.sizes.train": -5}, "data.sizes.train: found -5"),
    "large seed": (
        {"seed": 2**32},
        "seed: found 4294967296; expected a whole number of at least 0 and at most 4,294,967,295",
    ),
    "threads": ({"runner.num_threads": 0}, "runner.num_threads: found 0"),
    "many threads": ({"runner.num_threads": 10**9}, "runner.num_threads: found 1000000000"),
    "batch": ({"problems.classifier.stream.batch_size": 0}, "stream.batch_size: found 0"),
    "workers": ({"problems.classifier.stream.num_workers": -1}, "stream.num_workers: found -1"),
    "many workers": (
        {"problems.classifier.stream.num_workers": 10**4},
        "num_workers: found 10000; expected a whole number",
    ),
    "batches": (
        {"problems.classifier.accumulate_batches": 10**9},
        "accumulate_batches: found 1000000000; expected a whole number",
    ),
    "processes": (
        {"runner.devices": 10**8},
        "runner.devices: found 100000000; expected a whole number of at least 1 and at most 1,024 or auto",
    ),
    "precision": ({"problems.classifier.precision": ""}, "problems.classifier.precision: found ''; expected one of"),
    "no GPUs": ({"sweep.devices": []}, "sweep.devices: found []"),
    "analysis": ({"data.sizes": {"meta": 9, "val": 9, "test": 9}}, "analyses.weights.split: found 'train'"),
    "repeat": ({"problems.classifier.stream.repeat": 0}, "stream.repeat: found 0"),
}


NODES: dict[str, tuple[str, dict[str, Any]]] = {
    "classes": ("data", {"_target_": "mlotool.data.Digits", "num_classes": 0}),
    "seed of data": ("data", {"_target_": "mlotool.data.Digits", "seed": -1}),
    "share": ("data", {"_target_": "mlotool.data.TwoDomains", "target_share": 3.0}),
    "spread": ("data", {"_target_": "mlotool.data.SyntheticSpectra", "noise": -0.1}),
    "width": ("problems.reweight.module", {"_target_": "mlotool.models.WeightNet", "hidden": -1}),
    "shape": ("problems.classifier.module", {"_target_": "mlotool.models.MLP", "image_shape": []}),
    "layers": ("problems.classifier.module", {"_target_": "mlotool.models.ResNet", "depth": 10**12}),
    "dropout": ("problems.classifier.module", {"_target_": "mlotool.models.WideResNet", "dropout": 2.0}),
    "smoothing": ("problems.reweight.loss", {"_target_": "mlotool.losses.cross_entropy", "label_smoothing": -1.0}),
    "pull": ("problems.reweight.loss", {"_target_": "mlotool.losses.proximal_cross_entropy", "proximity": math.nan}),
    "victim": ("analyses.a", {"_target_": "mlotool.losses.attack_analysis", "victim_class": -1}),
    "radius": ("hypergradient", {"_target_": "mlotool.hypergradient.Implicit", "radius": math.nan}),
    "horizon": ("hypergradient", {"_target_": "mlotool.hypergradient.Unrolled", "horizon": 0}),
    "rank": ("hypergradient.solver", {"_target_": "mlotool.hypergradient.Nystrom", "rank": 10**6}),
    "terms": ("hypergradient.solver", {"_target_": "mlotool.hypergradient.Neumann", "num_terms": 10**9}),
    "rollouts": ("hypergradient", {"_target_": "mlotool.hypergradient.EvolutionStrategies", "num_pairs": 10**9}),
    "many cycles": ("problems.classifier.parallel", {"_target_": "mlotool.layerparallel.Multigrid", "cycles": 10**9}),
    "barrier": ("hypergradient", {"_target_": "mlotool.hypergradient.Penalty", "barrier": -1.0}),
    "sigma": ("hypergradient", {"_target_": "mlotool.hypergradient.EvolutionStrategies", "sigma": math.inf}),
    "cycles": ("problems.classifier.parallel", {"_target_": "mlotool.layerparallel.Multigrid", "cycles": -1}),
    "coarsening": ("problems.classifier.parallel", {"_target_": "mlotool.layerparallel.Multigrid", "coarsening": []}),
    "beta": ("problems.classifier.parallel", {"_target_": "mlotool.layerparallel.Auxiliary", "stages": 2, "beta": 0.0}),
}


@pytest.mark.parametrize("name", NODES)
def test_a_setting_of_our_own_that_is_out_of_range_is_found(name: str, changed: Change) -> None:
    key, node = NODES[name]
    setting, value = list(node.items())[-1]
    assert f"{key}.{setting}: found {value}; expected " in message_of(check, changed({key: node}))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("data.noise_of_mine", "hypergradient.solver.step_size"), math.nan),
        (("problems.classifier.gradient_clip_norm", "runner.checkpoint_seconds"), math.nan),
        (("problems.classifier.optimizer.momentum", "data.imbalance_factor"), math.nan),
    ],
)
def test_nan_is_found_wherever_it_stands(keys: tuple[str, ...], value: float, changed: Change) -> None:
    message = message_of(check, changed(dict.fromkeys(keys, value)))
    for key in keys:
        assert f"{key}: " in message


def test_a_value_that_others_refer_to_is_one_fault(changed: Change) -> None:
    message = message_of(check, changed({"data.num_classes": 0, "seed": -3}))
    assert [line.partition(": ")[0] for line in message.splitlines()] == ["seed", "data.num_classes"]


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_number_out_of_range_is_found(name: str, changed: Change) -> None:
    changes, part = OUT_OF_RANGE[name]
    assert part in message_of(check, changed(changes))


def test_all_at_once(changed: Change) -> None:
    faults = {
        f"{OPTIMIZER}.lr": -1.0,
        "seed": -3,
        "data.imbalance_factor": 0.5,
        "problems.reweight.stream.split": "mta",
        "runner.num_threads": 0,
        "hypergradient.solver.step_size": -1.0,
        **scheduler("StepLR", step_size=0),
    }
    lines = message_of(check, changed(faults), targets=True).splitlines()
    assert len(lines) == len(faults)
    assert any(
        line.startswith("hypergradient.solver.step_size: found -1.0; expected a number greater than 0")
        for line in lines
    )


BUILT: dict[str, tuple[dict[str, Any], str]] = {
    "solver": (
        {"hypergradient": {"_target_": "mlotool.hypergradient.Penalty", "rule": "barrier"}},
        "hypergradient",
    ),
    "optimizer": (
        {OPTIMIZER: {"_target_": "torch.optim.Adam", "lr": 0.1, "foreach": True, "fused": True}},
        f"{OPTIMIZER}: torch.optim.adam.Adam does not accept its settings",
    ),
    "nesterov": (
        {OPTIMIZER: {"_target_": "torch.optim.SGD", "lr": 0.1, "nesterov": True}},
        "Nesterov momentum requires",
    ),
    "factor": (scheduler("ReduceLROnPlateau", factor=1.5), "Factor should be < 1.0"),
    "scheduler": (
        scheduler("OneCycleLR", max_lr=0.2),
        f"{SCHEDULER}: torch.optim.lr_scheduler.OneCycleLR does not accept its settings",
    ),
}


@pytest.mark.parametrize("name", BUILT)
def test_what_its_class_refuses_is_found_with_targets(name: str, changed: Change) -> None:
    changes, part = BUILT[name]
    check(changed(changes))
    message = message_of(check, changed(changes), targets=True)
    assert part in message
    assert len(message.splitlines()) == 1


def test_what_this_machine_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = compose("mwn_cifar10", ["runner.accelerator=gpu"])
    check(config, targets=True)
    lines = message_of(check, config, targets=True, machine=True).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["runner.accelerator", "data.root"]
    (folder / "datasets").mkdir()
    check(compose("mwn_cifar10"), targets=True, machine=True)


ROUND_THE_WRONG_WAY: dict[str, tuple[dict[str, Any], str]] = {
    "both": (
        {"graph.upper_to_lower": {"classifier": ["reweight"]}, "graph.lower_to_upper": {"reweight": ["classifier"]}},
        "The edges are the wrong way round? Write graph.upper_to_lower.reweight: [classifier] and "
        "graph.lower_to_upper.classifier: [reweight].",
    ),
    "upper to lower": (
        {"graph.upper_to_lower": {"classifier": ["reweight"]}},
        "or graph.upper_to_lower.reweight: [classifier] if 'reweight' is",
    ),
    "lower to upper": (
        {"graph.lower_to_upper": {"reweight": ["classifier"]}},
        "Write graph.lower_to_upper.classifier: [reweight] if 'reweight' is the upper one",
    ),
}


@pytest.mark.parametrize("name", ROUND_THE_WRONG_WAY)
def test_edges_the_wrong_way_round_say_which_way_is_right(name: str, changed: Change) -> None:
    changes, part = ROUND_THE_WRONG_WAY[name]
    assert part in message_of(check, changed(changes))


def test_nan_may_be_a_setting_of_the_users_own_code(changed: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = {"_target_": "mine.loss", "missing": math.nan, "roles": {"model": "classifier"}}
    config = changed({"problems.classifier.loss": loss})
    [fault] = nan_faults(plain(config), ())
    assert fault.startswith("problems.classifier.loss.missing: found nan")
    monkeypatch.setattr(trusted, "_packages", {"mine": None})
    assert list(nan_faults(plain(config), ())) == []


BEYOND_TORCH = {
    "problems.classifier.tasks": 10**30,
    "problems.classifier.optimizer.lr": 10**400,
    "problems.classifier.stream.batch_size": 2**63,
    "data.sizes.train": -(10**19),
    "sweep.workers": 10**30,
    "runner.log_every": 1 << 20_000,  # Python writes no number of so many digits
}


@pytest.mark.parametrize("key", BEYOND_TORCH)
def test_a_whole_number_that_torch_has_no_room_for_is_refused(key: str, changed: Change) -> None:
    value = BEYOND_TORCH[key]
    message = message_of(check, changed({key: value}))
    assert message == (
        f"{key}: found a whole number of {value.bit_length()} bits; expected at most 63, as torch's numbers have. "
        f"Correct {key}."
    )


@pytest.mark.parametrize("key", ["workers", "jobs_per_device", "num_trials", "repeats", "fuse"])
def test_a_sweep_has_a_number_of_jobs_and_processes_that_can_be_run(key: str, changed: Change) -> None:
    message = message_of(check, changed({f"sweep.{key}": 10**9, "sweep.method": "optuna"}))
    assert message.startswith(f"sweep.{key}: found 1000000000; expected a whole number of at least 1 and at most 1,0")
