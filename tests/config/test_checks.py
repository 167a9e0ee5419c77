"""The whole config is checked before a run, with every fault in one message."""

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import DictConfig

from mlotool.config import check, compose
from mlotool.config.check_values import nan_faults
from mlotool.config.composition import plain
from mlotool.config.schema import CLASSIFICATION_METRIC_NAMES, METRIC_NAMES, ProblemConfig
from mlotool.config.security import trusted
from mlotool.core.errors import ConfigError
from mlotool.runner.evaluation import CLASSIFICATION_METRICS
from mlotool.runner.evaluation import METRIC_NAMES as EVALUATED
from tests.config.conftest import message_of

Change = Callable[[dict[str, Any]], DictConfig]
CLASSIFIER = "problems.classifier"
MODULE, OPTIMIZER, SCHEDULER = (f"{CLASSIFIER}.{node}" for node in ("module", "optimizer", "scheduler"))


def changes_of(row: str) -> dict[str, Any]:
    """Read the changes of a row; `C` and `R` are the recipe's two problems, a target's class may stand alone."""
    row = re.sub(r"\bt: ", "_target_: ", row).replace(": Lr.", ": torch.optim.lr_scheduler.")
    changes = yaml.safe_load(row.replace("C.", "problems.classifier.").replace("R.", "problems.reweight."))
    return dict(changes)


# The changes of the recipe mwn, and what the message says.
FAULTS = {
    "{graph.upper_to_lower: {}}": "graph.upper_to_lower.reweight",
    "{graph.lower_to_upper: {classifier: [reweight], reweight: [classifier]}}": "graph.lower_to_upper: a cycle",
    "{graph.upper_to_lower: {classifier: [reweight]}}": "or graph.upper_to_lower.reweight: [classifier] if 'reweight'",
    "{graph.upper_to_lower: {classifier: [reweight]}, graph.lower_to_upper: {reweight: [classifier]}}": "The edges are "
    "the wrong way round? Write graph.upper_to_lower.reweight: [classifier] and graph.lower_to_upper.classifier: [rew",
    "{R.loss.roles: {modle: classifier}}": "unknown role 'modle'",
    "{C.loss.roles: {model: classifier}}": "loss.roles.weigher",
    "{R.loss.roles.model: {problem: classifier, mode: evl}}": "train | eval",
    "{evaluate.splits.val: often}": "evaluate.splits.val: found 'often'",
    "{evaluate.metrics: [acuracy]}": "Did you mean 'accuracy'?",
    "{objective: test/accuracy, runner.early_stopping_patience: 3}": "runner.early_stopping_patience: found 3",
    "{C.optimizer.lr: '${lrr}'}": "optimizer.lr: found ${lrr}",
    "{C.module.hiden: [1]}": "unknown keyword 'hiden' of mlotool.models.MLP",
    "{C.module: {t: mlotool.models.MLP}}": "num_classes: missing",
    "{C.scheduler: {t: Lr.ChainedScheduler, schedulers: [{t: Lr.LinearLR, total_iter: 5}]}}": "[0].total_iter: unkn",
    "{runner.devices: 100000000}": "runner.devices: found 100000000; expected a whole number of at least 1",
    "{C.optimizer: {t: torch.optim.Adam, betas: [0.9, 1.5]}}": "betas: found [0.9, 1.5]; expected a list of numbers",
    "{C.scheduler: {t: Lr.MultiStepLR, milestones: [20, 10]}}": "milestones: found [20, 10]",
    "{C.scheduler: {t: Lr.ChainedScheduler, schedulers: [{t: Lr.StepLR, step_size: -1}]}}": "[0].step_size: found -1",
    "{data.label_noise: {kind: flip, rate: 1.5}}": "data.label_noise.rate: found 1.5",
    "{C.parallel: {t: mlotool.layerparallel.Auxiliary, stages: 2, beta: 0.0}}": "beta: found 0.0",
}


@pytest.mark.parametrize("row", FAULTS)
def test_a_fault_is_found(row: str, changed: Change) -> None:
    assert FAULTS[row] in message_of(check, changed(changes_of(row)))


def test_names_of_problems(changed: Change) -> None:
    for name, part in {"2nd": "2nd: found", "val": "val: found", "clasifier": "Did you mean 'classifier'?"}.items():
        assert part in message_of(check, changed({f"problems.{name}": ProblemConfig()}))


def test_all_faults_come_in_one_message(changed: Change) -> None:
    faults = {
        f"{OPTIMIZER}.lr": -1.0,
        "seed": -3,
        "objective": "val/x",
        f"{MODULE}.hiden": 1,
        "problems.reweight.stream.split": "mta",
        "hypergradient.solver.step_size": -1.0,
        "data.num_classes": 0,  # which others refer to
    }
    lines = message_of(check, changed(faults), targets=True).splitlines()
    assert {line.partition(": ")[0] for line in lines} == faults.keys()
    assert len(lines) == len(faults)


def test_nan_is_found_wherever_it_stands_but_in_settings_of_the_users_code(
    changed: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("data.noise_of_mine", "hypergradient.solver.step_size", f"{OPTIMIZER}.momentum")
    message = message_of(check, changed(dict.fromkeys(keys, math.nan)))
    assert all(f"{key}: " in message for key in keys)
    loss = {"_target_": "mine.loss", "missing": math.nan, "roles": {"model": "classifier"}}
    config = changed({f"{CLASSIFIER}.loss": loss})
    [fault] = nan_faults(plain(config), ())
    assert fault.startswith("problems.classifier.loss.missing: found nan")
    monkeypatch.setattr(trusted, "_packages", {"mine": None})
    assert list(nan_faults(plain(config), ())) == []


@pytest.mark.parametrize("number", [10**30, 2**63, -(10**19), 1 << 20_000], ids=["30", "63", "19", "no digits"])
@pytest.mark.parametrize("key", [f"{CLASSIFIER}.tasks", f"{OPTIMIZER}.lr", "data.sizes.train"])
def test_a_whole_number_that_torch_has_no_room_for_is_refused(key: str, number: int, changed: Change) -> None:
    message = message_of(check, changed({key: number}))
    assert message.startswith(f"{key}: found a whole number of {number.bit_length()} bits; expected at most 63")


BUILT = {
    "{hypergradient: {t: mlotool.hypergradient.Penalty, rule: barrier}}": "hypergradient.barrier: found None",
    "{C.optimizer: {t: torch.optim.Adam, lr: 0.1, foreach: true, fused: true}}": "does not accept its settings",
    "{C.scheduler: {t: Lr.OneCycleLR, max_lr: 0.2}}": "lr_scheduler.OneCycleLR does not accept its settings",
}


@pytest.mark.parametrize("row", BUILT)
def test_what_its_class_refuses_is_found_with_targets(row: str, changed: Change) -> None:
    config = changed(changes_of(row))
    check(config)
    [line] = message_of(check, config, targets=True).splitlines()
    assert BUILT[row] in line


PARTS = {
    "{data.num_classes: 7}": "data.num_classes=7; expected 10, the number of classes that the data has",
    "{data.label_noise.kind: flp}": "data.label_noise.kind: found 'flp'; expected one of uniform, flip",
    "{data.sizes.train: 5000}": "data.sizes",
    "{C.module: {t: mlotool.models.ResNet, depth: 9, image_shape: [1, 8, 8], num_classes: 10}}": f"{MODULE}: ",
    "{C.module.hidden: [1000000000, 1000000000]}": f"{MODULE}: its parameters take 4,000,000",
    "{C.optimizer.groups: [{match: nothing.*, lr: 0.1}]}": f"{OPTIMIZER}.groups",
    "{C.remat: [layer.*]}": f"{CLASSIFIER}.remat: found 'layer.*'; expected a path of submodules of MLP",
    "{C.remat: auto}": f"{CLASSIFIER}.remat: found 'auto'; expected auto with repeated",
    "{C.module: {t: torch.nn.Flatten}}": f"{OPTIMIZER}: torch.optim.sgd.SGD does not accept",
    "{C.parallel: {t: mlotool.layerparallel.Multigrid}}": "parallel.part: found no equal blocks that follow each other",
}


@pytest.mark.parametrize("row", PARTS)
def test_what_a_part_refuses_is_found(row: str, changed: Change) -> None:
    [line] = message_of(check, changed(changes_of(row)), targets=True, parts=True).splitlines()
    assert PARTS[row] in line


def test_a_sound_recipe_stays_sound_and_draws_no_random_numbers(composed: DictConfig) -> None:
    before = torch.random.get_rng_state()
    check(composed, targets=True, parts=True)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_nothing_is_downloaded_and_what_this_machine_lacks_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [warning] = check(compose("mwn_cifar10", ["data.download=true", "data.root=here"]), targets=True, parts=True)
    assert "downloaded to 'here'" in warning
    config = compose("mwn_cifar10", ["runner.accelerator=gpu"])
    check(config, targets=True, parts=True)
    assert not list(folder.iterdir())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    lines = message_of(check, config, targets=True, machine=True).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["runner.accelerator", "data.root"]
    (folder / "datasets").mkdir()
    check(compose("mwn_cifar10"), machine=True)


WARNINGS = {
    "{objective: test/accuracy, evaluate.splits.test: 100}": "selects the best checkpoint",
    "{R.stream.split: test}": "trains on test data",
    "{R.stream.split: val}": "trains on the data of the objective",
    "{R.stream.batch_size: 5000}": "stream.batch_size: found 5000 with data.sizes.meta=",
    "{R.unroll_steps: 20}": "unroll_steps: has no effect, as no problem reads the solution of 'reweight'. Move it to "
    "problems.classifier.unroll_steps.",
    "{logger.mode: online, logger.wandb: false}": "logger.mode: found 'online'",
    "{runner.tf32: true}": "runner.tf32: found true, while hypergradient compares nearby points",
    "{runner.tf32: true, hypergradient: {t: mlotool.hypergradient.Penalty}}": "nearby points (Penalty)",
}


@pytest.mark.parametrize("row", WARNINGS)
def test_a_doubtful_choice_warns(row: str, changed: Change) -> None:
    [warning] = [line for line in check(changed(changes_of(row))) if WARNINGS[row] in line]
    assert warning


def test_what_does_as_it_says_does_not_warn(changed: Change) -> None:
    assert check(changed({"logger.mode": "online"})) == []
    assert check(changed({"runner.tf32": True, "hypergradient.product": "reverse"})) == []


def test_a_removed_key_of_the_root_is_a_fault() -> None:
    assert "Write evaluate=null." in message_of(check, compose("plain", ["~evaluate"]))
    assert "Write seed=.." in message_of(check, compose("plain", ["~seed"]))


def test_a_left_over_key_names_its_recipe(write_recipe: Callable[..., Path]) -> None:
    path = write_recipe("defaults: [mwn, _self_]\nproblems: {classifier: {module: {hidden: [7]}}}\n")
    message = message_of(check, compose("mine", ["model@problems.classifier.module=linear"]))
    assert str(path) in message
    assert "problems.classifier.module.hidden" in message


def test_an_option_in_the_place_of_a_node_is_told_as_such(changed: Change) -> None:
    message = message_of(check, changed({"hypergradient": "cg"}))
    assert "Write `- override /hypergradient: cg` at the end of the recipe's defaults list." in message


LINEAR, KEEPS = {"_target_": "torch.nn.Linear"}, {"_target_": "mlotool.spaces.KeepsShape"}

explored = cache(compose)


def _check_mutator(name: str, **settings: Any) -> None:
    config = explored("explore_mwn").copy()
    mutator = {"_target_": f"mlotool.spaces.{name}", "name": "own", "at": "layers.3", **settings}
    config.problems.classifier.module.mutators = [mutator]
    check(config)


def test_nodes_of_a_mutator_are_of_the_kind_of_their_place() -> None:
    # A candidate has any name, those of settings included.
    _check_mutator("Insert", candidates={"where": LINEAR, "at": LINEAR, "mutators": LINEAR})
    _check_mutator("Insert", at={"chain": ["layers.3", {"where": KEEPS}]}, candidates={"none": None})
    _check_mutator("Input", sources={"where": KEEPS})
    inside = {"_target_": "mlotool.spaces.Insert", "candidates": {"linear": LINEAR}}
    _check_mutator("Grow", steps=1, mutators={"deepen": inside})
    for key, name, settings in (
        ("candidates.keeps", "Insert", {"candidates": {"keeps": KEEPS}}),
        ("at.where", "Insert", {"at": {"where": LINEAR}, "candidates": {"none": None}}),
        ("mutators.deepen", "Grow", {"steps": 1, "mutators": {"deepen": LINEAR}}),
        ("mutators.os", "Grow", {"steps": 1, "mutators": {"os": {"_target_": "os.system"}}}),
    ):
        with pytest.raises(ConfigError, match=rf"mutators\[0\]\.{key}\._target_: found '.*expected"):
            _check_mutator(name, **settings)
    branch = {"_target_": "mlotool.spaces.Branch", "candidates": {"linear": LINEAR}, "joint": "sum"}
    with pytest.raises(ConfigError, match=r"unknown keyword 'joint' of mlotool\.spaces\.Branch.*Did you mean 'join'"):
        _check_mutator("Grow", steps=1, mutators={"branch": branch})


def test_metric_names_are_those_of_the_runner() -> None:
    assert tuple(EVALUATED) == METRIC_NAMES
    assert tuple(CLASSIFICATION_METRICS) == CLASSIFICATION_METRIC_NAMES
