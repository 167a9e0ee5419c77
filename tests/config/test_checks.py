"""The whole config is checked, with every fault in one message."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import mlotool
from mlotool.config import check, compose
from mlotool.config.schema import CLASSIFICATION_METRIC_NAMES, METRIC_NAMES, ProblemConfig
from mlotool.core.errors import ConfigError
from mlotool.runner.evaluation import CLASSIFICATION_METRICS
from mlotool.runner.evaluation import METRIC_NAMES as EVALUATED
from tests.config.conftest import message_of

Change = Callable[[dict[str, Any]], DictConfig]
CLASSIFIER, REWEIGHT = "problems.classifier", "problems.reweight"

FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "edge missing": (
        {"graph.upper_to_lower": {}},
        [f"{CLASSIFIER}.loss.roles.weigher", "graph.upper_to_lower.reweight"],
    ),
    "cycle": (
        {"graph.lower_to_upper": {"classifier": ["reweight"], "reweight": ["classifier"]}},
        ["graph.lower_to_upper: a cycle"],
    ),
    "edge unused": (
        {f"{CLASSIFIER}.loss": {"_target_": "mlotool.losses.cross_entropy", "roles": {"model": "classifier"}}},
        ["nothing uses the edge"],
    ),
    "edge to nobody": ({"graph.upper_to_lower": {"reweigh": ["classifier"]}}, ["Did you mean 'reweight'?"]),
    "role of nobody": ({f"{CLASSIFIER}.loss.roles.weigher": "rewieght"}, ["rewieght", "Did you mean 'reweight'?"]),
    "role unknown": ({f"{REWEIGHT}.loss.roles": {"modle": "classifier"}}, ["unknown role 'modle'", "'model'?"]),
    "role missing": ({f"{CLASSIFIER}.loss.roles": {"model": "classifier"}}, [f"{CLASSIFIER}.loss.roles.weigher"]),
    "role mode": ({f"{REWEIGHT}.loss.roles.model": {"problem": "classifier", "mode": "evl"}}, ["train | eval"]),
    "role as setting": ({f"{REWEIGHT}.loss.model": "classifier"}, [f"{REWEIGHT}.loss.model"]),
    "analysis role": ({"analyses.weights.roles.model": "clasifier"}, ["Did you mean 'classifier'?"]),
    "analysis split": ({"analyses.weights.split": "trian"}, ["analyses.weights.split", "Did you mean 'train'?"]),
    "analysis batch": ({"analyses.weights.batch_size": 0}, ["analyses.weights.batch_size: found 0"]),
    "remat as a flag": ({f"{CLASSIFIER}.remat": True}, [f"{CLASSIFIER}.remat: found True"]),
    "remat as numbers": ({f"{CLASSIFIER}.remat": [3]}, [f"{CLASSIFIER}.remat: found [3]"]),
    "stream split": ({f"{CLASSIFIER}.stream.split": "trian"}, [f"{CLASSIFIER}.stream.split", "'train'?"]),
    "evaluate split": ({"evaluate.splits": {"vall": 100}}, ["evaluate.splits.vall", "Did you mean 'val'?"]),
    "evaluate interval": ({"evaluate.splits.val": "often"}, ["evaluate.splits.val: found 'often'", "end"]),
    "evaluate metric": ({"evaluate.metrics": ["acuracy"]}, ["found 'acuracy'", "Did you mean 'accuracy'?"]),
    "evaluate problem": ({"evaluate.problem": "clasifier"}, ["evaluate.problem", "Did you mean 'classifier'?"]),
    "objective": ({"objective": "val/acuracy"}, ["objective: found 'val/acuracy'", "Did you mean 'val/accuracy'?"]),
    "objective bare": ({"objective": "accuracy"}, ["objective: found 'accuracy'"]),
    "patience": (
        {"objective": "test/accuracy", "runner.early_stopping_patience": 3},
        ["runner.early_stopping_patience: found 3"],
    ),
    "reference": ({f"{CLASSIFIER}.optimizer.lr": "${lrr}"}, [f"{CLASSIFIER}.optimizer.lr", "lrr"]),
    "gap": ({f"{CLASSIFIER}.optimizer.lr": "???"}, [f"{CLASSIFIER}.optimizer.lr: nothing is set"]),
    "stray problem": (
        {"problems.clasifier": ProblemConfig()},
        ["problems.clasifier.module", "Did you mean 'classifier'?"],
    ),
    "stray key": ({f"{CLASSIFIER}.unrol_steps": 2}, ["unrol_steps", "Did you mean 'unroll_steps'?"]),
    "stray root key": ({"foo/bar": 2}, ["foo/bar"]),
    "no optimizer": ({f"{CLASSIFIER}.optimizer": None}, [f"{CLASSIFIER}.optimizer: found None", "_target_"]),
    "keyword": ({f"{CLASSIFIER}.module.hiden": [1]}, ["hiden", "mlotool.models.MLP", "Did you mean 'hidden'?"]),
    "keyword missing": ({f"{CLASSIFIER}.module": {"_target_": "mlotool.models.MLP"}}, ["num_classes: missing"]),
    "keyword type": ({f"{REWEIGHT}.module.hidden": "wide"}, ["found 'wide'", "a whole number"]),
    "keyword item": ({f"{CLASSIFIER}.module.hidden": ["a"]}, [f"{CLASSIFIER}.module.hidden: found ['a']"]),
    "solver keyword": ({"hypergradient.solver.steps": 1}, ["hypergradient.solver.steps", "step_size"]),
    "no solver": ({"hypergradient.solver": "cg"}, ["hypergradient.solver: found 'cg'", "_target_"]),
    "instantiate key": ({f"{CLASSIFIER}.optimizer._partial_": True}, ["_partial_"]),
    "wrong kind": ({f"{CLASSIFIER}.optimizer": {"_target_": "torch.nn.Linear"}}, ["no optimizer", "torch.optim."]),
    "name": ({"name": "../x"}, ["name: found '../x'"]),
    "problem name": ({"problems.2nd": ProblemConfig()}, ["problems.2nd", "Rename"]),
    "problem like a split": ({"problems.val": ProblemConfig()}, ["problems.val", "evaluate.splits"]),
    "devices": ({"runner.devices": 0}, ["runner.devices: found 0", "or auto"]),
    "trace": ({"runner.trace": "induktor"}, ["runner.trace: found 'induktor'", "Did you mean 'inductor'?"]),
    "precision": ({"runner.precision": "bf61"}, ["found 'bf61'", "Did you mean 'bf16'?"]),
    "accelerator": ({"runner.accelerator": "cuda"}, ["runner.accelerator: found 'cuda'"]),
    "logger": ({"logger.mode": "ofline"}, ["Did you mean 'offline'?"]),
    "scheduler interval": ({f"{CLASSIFIER}.scheduler_interval": "epoch"}, ["scheduler_interval: found 'epoch'"]),
    "ticks": ({"runner.max_ticks": -1}, ["runner.max_ticks: found -1"]),
    "seed": ({"seed": -1}, ["seed: found -1"]),
    "clip": ({f"{CLASSIFIER}.gradient_clip_norm": 0.0}, ["gradient_clip_norm: found 0.0"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, changed: Change) -> None:
    changes, parts = FAULTS[name]
    message = message_of(check, changed(changes))
    assert all(part in message for part in parts), message


def test_all_faults_come_in_one_message(changed: Change) -> None:
    faults = {
        "runner.devices": 0,
        "objective": "val/x",
        f"{CLASSIFIER}.module.hiden": 1,
        f"{REWEIGHT}.stream.split": "mta",
    }
    lines = message_of(check, changed(faults)).splitlines()
    assert len(lines) == 4
    assert all(any(line.startswith(key) for line in lines) for key in faults)


TORCH_FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "keyword": ({f"{CLASSIFIER}.optimizer.momentun": 0.9}, ["momentun", "torch.optim.SGD", "Did you mean 'momentum'?"]),
    "type": ({f"{CLASSIFIER}.optimizer.momentum": "much"}, ["momentum: found 'much'"]),
    "missing": (
        {f"{CLASSIFIER}.scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR"}},
        [f"{CLASSIFIER}.scheduler.step_size: missing"],
    ),
    "ours": ({f"{CLASSIFIER}.optimizer.params": []}, ["fills 'params' in itself"]),
    "nested": (
        {
            f"{CLASSIFIER}.scheduler": {
                "_target_": "torch.optim.lr_scheduler.SequentialLR",
                "milestones": [5],
                "schedulers": [
                    {"_target_": "torch.optim.lr_scheduler.LinearLR", "total_iter": 5},
                    {"_target_": "torch.optim.lr_scheduler.StepLR"},
                ],
            }
        },
        ["schedulers[0].total_iter", "Did you mean 'total_iters'?", "schedulers[1].step_size: missing"],
    ),
}


@pytest.mark.parametrize("name", TORCH_FAULTS)
def test_third_party_targets_are_compared(name: str, changed: Change) -> None:
    changes, parts = TORCH_FAULTS[name]
    message = message_of(check, changed(changes))
    assert all(part in message for part in parts), message


WARNINGS: dict[str, tuple[dict[str, Any], str]] = {
    "objective on test": ({"objective": "test/accuracy", "evaluate.splits.test": 100}, "selects the best checkpoint"),
    "training on test": ({f"{REWEIGHT}.stream.split": "test"}, "trains on test data"),
    "training on val": ({f"{REWEIGHT}.stream.split": "val"}, "trains on the data of the objective"),
    "batch larger than its split": (
        {f"{REWEIGHT}.stream.batch_size": 5000},
        f"{REWEIGHT}.stream.batch_size: found 5000, while data.sizes.meta=",
    ),
    "steps of an upper problem": (
        {"problems.reweight.unroll_steps": 20},
        "problems.reweight.unroll_steps: found 20, while no problem reads the solution of 'reweight'; expected it at "
        "the lower problem, whose steps are counted. Here it has no effect. Move it to problems.classifier.unroll",
    ),
    "warm-up of an upper problem": (
        {"problems.reweight.warmup_steps": 20},
        "problems.reweight.warmup_steps: found 20, while no problem reads",
    ),
    "mode of no logger": ({"logger.mode": "online", "logger.wandb": False}, "logger.mode: found 'online'"),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_doubtful_choice_warns(name: str, changed: Change) -> None:
    changes, part = WARNINGS[name]
    [warning] = check(changed(changes))
    assert part in warning


def test_what_does_as_it_says_does_not_warn(changed: Change) -> None:
    assert check(changed({"logger.mode": "online"})) == []
    assert check(changed({"runner.tf32": True, "hypergradient.product": "reverse"})) == []
    assert check(changed({"logger.wandb": False, "debug.limit_ticks": 5})) == []


def test_a_removed_key_of_the_root_is_a_fault() -> None:
    assert "Write evaluate=null." in message_of(check, compose("plain", ["~evaluate"]))
    assert "Write seed=.." in message_of(check, compose("plain", ["~seed"]))


def test_a_download_is_announced() -> None:
    [warning] = check(compose("mwn_cifar10", ["data.download=true", "data.root=here"]))
    assert "downloaded to 'here'" in warning


def test_a_left_over_key_names_both_sources(write_recipe: Callable[..., Path]) -> None:
    path = write_recipe("defaults: [mwn, _self_]\nproblems: {classifier: {module: {hidden: [7]}}}\n")
    assert check(compose("mine")) == []
    message = message_of(check, compose("mine", ["model@problems.classifier.module=linear"]))
    assert str(path) in message
    assert "model=linear" in message
    assert "problems.classifier.module.hidden" in message


def test_whatever_stands_anywhere_is_accepted_or_refused_by_a_config_error(composed: DictConfig) -> None:
    """No key and no value leads to another exception."""
    for path in _paths(composed):
        for value in ("???", ["x"]):
            config = composed.copy()
            try:
                with open_dict(config):
                    OmegaConf.update(config, path, value, merge=False, force_add=True)
            except (OmegaConfBaseException, ValueError):
                continue
            try:
                check(config)
            except ConfigError as error:
                assert path.rpartition(".")[2] in str(error) or "problems" in str(error)


def _paths(node: DictConfig, prefix: str = "") -> list[str]:
    found = []
    for key in node:
        path = f"{prefix}{key}"
        child = node._get_node(key)
        found += [path, *(_paths(child, f"{path}.") if isinstance(child, DictConfig) and child else [])]
    return found


def test_an_option_of_the_root_is_told_as_such(changed: Change) -> None:
    with pytest.raises(ConfigError) as error:
        check(changed({"hypergradient": "cg"}))
    assert str(error.value) == (
        "hypergradient: found 'cg'; expected a node that says what to build. Write hypergradient=cg on the command "
        "line, or `- override /hypergradient: cg` at the end of the recipe's defaults list."
    )


@pytest.mark.parametrize(
    ("hypergradient", "kind"),
    [("finite_difference", "finite differences"), ("penalty", "Penalty"), ("evolution", "Evolution")],
)
def test_differences_of_rounded_numbers_are_warned_of(hypergradient: str, kind: str) -> None:
    [warning] = check(compose("mwn", ["runner.tf32=true", f"hypergradient={hypergradient}"]))
    assert warning.startswith("runner.tf32: found true, while hypergradient compares nearby points") and kind in warning
    assert check(compose("mwn", [f"hypergradient={hypergradient}"])) == []
    assert check(compose("mwn", ["runner.tf32=true", "hypergradient=neumann"])) == []


def test_metric_names_are_those_of_the_runner() -> None:
    assert tuple(EVALUATED) == METRIC_NAMES
    assert tuple(CLASSIFICATION_METRICS) == CLASSIFICATION_METRIC_NAMES


def test_composing_needs_no_torch() -> None:
    code = """
import sys, time
start = time.perf_counter()
from mlotool.config import compose, list_recipes
for recipe in list_recipes():
    compose(recipe.name)
heavy = {"torch", "torchvision", "sklearn", "pytorch_lightning", "wandb", "numpy"} & set(sys.modules)
print(f"{time.perf_counter() - start:.2f} s for all recipes; imported: {sorted(heavy)}")
sys.exit(len(heavy))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(mlotool.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_analysis_with_the_name_of_a_problem() -> None:
    config = compose("mwn", ["+analyses.classifier=${analyses.weights}", "~analyses.weights"])
    with pytest.raises(ConfigError, match=r"analyses.classifier: found the name of a problem.*classifier_analysis"):
        check(config)
