import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from mlotool.config import build, check, compose, trust
from mlotool.config.trusted import resolve, trust_fault, trusted_names
from mlotool.core.messages import command_line
from tests.config.conftest import message_of

Change = Callable[[dict[str, Any]], DictConfig]
HOSTILE = [
    "os.system",
    "builtins.eval",
    "builtins.exec",
    "subprocess.run",
    "pickle.loads",
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "torch.nn.modules.module.torch.load",
    "torch.optim.optimizer.torch.load",
    "torchvision.datasets.folder.os.system",
    "torchvision.models.resnet18",
    "torchmetrics.utilities.imports.shutil.rmtree",
    "mlotool.data.cifar10.datasets.CIFAR10",
    "mlotool.config.provenance.subprocess.run",
    "mlotool.runner.run.run",
    "mlotool.losses.analyses.torch.load",
    "hydra.utils.instantiate",
    "",
    "eval",
    "torch.nn.Linear.__init__.__globals__",
]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", ["module", "loss", "optimizer", "scheduler", "hypergradient", "module.inner"])
def test_no_hostile_target_gets_through(name: str, place: str, changed: Change) -> None:
    config = changed({f"problems.classifier.{place}": {"_target_": name}})
    message = message_of(check, config)
    assert f"problems.classifier.{place}._target_: found '{name}'" in message
    assert "expected one of" in message
    with pytest.raises(ValueError, match="not trusted"):
        resolve("key", name)


@pytest.mark.parametrize("value", [3, None, ["os.system"], {"_target_": "os.system"}])
def test_a_target_is_a_text(value: Any, changed: Change) -> None:
    assert "_target_" in message_of(check, changed({"data._target_": value}))


def test_nothing_untrusted_is_imported(changed: Change) -> None:
    config = changed({"problems.classifier.module._target_": "this.d"})
    assert "found 'this.d'" in message_of(check, config, targets=True)
    assert "found 'this.d'" in message_of(build, config)
    assert "this" not in sys.modules


@pytest.mark.parametrize("name", trusted_names())
def test_trusted_names_are_there(name: str) -> None:
    assert resolve("key", name).__name__ == name.rpartition(".")[2]


def test_models_of_torchvision_have_a_function() -> None:
    for name in ("torchvision.models.resnet18", "torchvision.models.resnet.resnet18"):
        fault = str(trust_fault("key", name, "module"))
        words = "{_target_: mlotool.models.torchvision_model, name: resnet18, num_classes: .., image_shape: ..}"
        assert f"For it write {words}. Correct the name." in fault
    assert "torchvision_model" not in str(trust_fault("key", "torchvision.models.resnet18", "optimizer"))


def test_a_close_name_is_suggested() -> None:
    assert "Did you mean 'torch.optim.SGD'?" in str(trust_fault("key", "torch.optim.sgd.SGD", "optimizer"))
    assert "Did you mean 'mlotool.models.WeightNet'?" in str(trust_fault("key", "mlotool.models.WeigthNet", "module"))


@pytest.fixture
def own_package(folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A package of the user's in the working directory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"mymodels_{abs(hash(request.node.name))}"
    home = folder / name
    home.mkdir()
    (home / "__init__.py").write_text("import os\nfrom torch import load\nfrom .nets import Net\n")
    (home / "nets.py").write_text(
        "import torch\n\n\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self, image_shape: list[int], num_classes: int, fail: bool = False) -> None:\n"
        "        super().__init__(64, num_classes)\n"
        "        if fail:\n"
        "            raise RuntimeError('no luck')\n\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.flatten(1))\n"
    )
    return name


def _own(name: str, target: str, **settings: Any) -> dict[str, Any]:
    settings.setdefault("image_shape", [1, 8, 8])
    return {"problems.classifier.module": {"_target_": f"{name}.{target}", "num_classes": 10, **settings}}


def test_an_own_package_is_trusted_by_name(own_package: str, changed: Change) -> None:
    config = changed(_own(own_package, "Net"))
    assert f"trust=['{own_package}']" in message_of(check, config)
    with command_line():
        assert f"--trust {own_package}" in message_of(check, config)
    trust(own_package)
    assert check(config) == []
    assert type(build(config).program.problems["classifier"].module).__name__ == "Net"


def test_an_own_package_is_read_for_its_signature(own_package: str, changed: Change) -> None:
    trust(own_package)
    assert "Did you mean 'fail'?" in message_of(check, changed(_own(own_package, "Net", fial=True)))
    assert "image_shape: found 'x'" in message_of(check, changed(_own(own_package, "nets.Net", image_shape="x")))


@pytest.mark.parametrize("target", ["os.system", "load", "nets.torch.load", "Nothing", "os"])
def test_trust_ends_at_the_package(target: str, own_package: str) -> None:
    trust(own_package)
    message = message_of(resolve, "problems.classifier.module", f"{own_package}.{target}")
    assert f"problems.classifier.module._target_: found '{own_package}.{target}'" in message


def test_what_an_own_constructor_raises_names_key_and_line(own_package: str, changed: Change) -> None:
    trust(own_package)
    message = message_of(build, changed(_own(own_package, "Net", fail=True)))
    assert all(part in message for part in ("problems.classifier.module", "RuntimeError: no luck", "nets.py, line 8"))


@pytest.mark.parametrize(
    "package", ["os", "builtins", "torch", "mlotool", "subprocess", "a.b", "../x", "", "nowhere_xyz"]
)
def test_what_cannot_be_trusted(package: str, folder: Path) -> None:
    assert f"trust=['{package}']" in message_of(trust, package)
    with command_line():
        assert f"--trust {package}" in message_of(trust, package)


def test_a_misspelt_package_is_suggested(own_package: str) -> None:
    assert f"Did you mean '{own_package}'?" in message_of(trust, own_package[:-1])


CIFAR10 = {"_target_": "mlotool.data.CIFAR10", "_args_": ["elsewhere", {"train": 10}, 10, [3, 32, 32], 0, None, None]}
MODEL = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}
OPTIMIZER = {"_target_": "torch.optim.SGD", "lr": 0.1}
LOSS = {"_target_": "mlotool.losses.cross_entropy"}
SCHEDULER = {"_target_": "torch.optim.lr_scheduler.ConstantLR"}
MODULE = "problems.classifier.module"


def _sequential(*layers: Any) -> dict[str, Any]:
    return {"_target_": "torch.nn.Sequential", "_args_": list(layers)}


MISPLACED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "data in a module": ({MODULE: _sequential(CIFAR10)}, [f"{MODULE}._args_[0]._target_", "no module"]),
    "data deep in a module": (
        {MODULE: _sequential(_sequential(MODEL, CIFAR10))},
        [f"{MODULE}._args_[0]._args_[1]._target_", "no module"],
    ),
    "data as a keyword of a module": ({f"{MODULE}.hidden": CIFAR10}, [f"{MODULE}.hidden._target_", "no module"]),
    "data as the roles of a module": ({f"{MODULE}.roles": CIFAR10}, [f"{MODULE}.roles._target_", "no module"]),
    "data in a list in a mapping": (
        {f"{MODULE}.hidden": {"a": [CIFAR10]}},
        [f"{MODULE}.hidden.a[0]._target_", "no module"],
    ),
    "loss in a module": ({MODULE: _sequential(LOSS)}, ["no module"]),
    "optimizer in a module": ({MODULE: _sequential(OPTIMIZER)}, ["no module"]),
    "data in a loss": ({"problems.classifier.loss.x": CIFAR10}, ["problems.classifier.loss.x._target_", "no module"]),
    "module in a scheduler": ({"problems.classifier.scheduler": {**SCHEDULER, "factor": MODEL}}, ["no scheduler"]),
    "module in an optimizer": ({"problems.classifier.optimizer.lr": MODEL}, ["optimizer.lr._target_", "plain values"]),
    "data in data": ({"data.root": CIFAR10}, ["data.root._target_", "plain values"]),
    "data that is none": ({"data": {"_target_": "mlotool.data.corrupt_labels"}}, ["not trusted", "mlotool.data.MNIST"]),
    "solver that is a model": ({"hypergradient.solver": MODEL}, ["hypergradient.solver._target_", "no solver"]),
    "solver that is an algorithm": (
        {"hypergradient.solver": {"_target_": "mlotool.hypergradient.FirstOrder"}},
        ["no solver", "mlotool.hypergradient.Neumann"],
    ),
    "hypergradient that is a solver": (
        {"hypergradient": {"_target_": "mlotool.hypergradient.Identity"}},
        ["no hypergradient", "mlotool.hypergradient.Implicit"],
    ),
    "solver of a problem": (
        {"problems.classifier.hypergradient": {"_target_": "mlotool.hypergradient.Implicit", "solver": CIFAR10}},
        ["problems.classifier.hypergradient.solver._target_", "no solver"],
    ),
    "data by position": ({"data": CIFAR10}, ["data._args_", "keywords", "torch.nn.Sequential"]),
    "optimizer by position": ({"problems.classifier.optimizer._args_": [[], 0.1]}, ["optimizer._args_", "keywords"]),
    "no list": ({f"{MODULE}._args_": 3}, [f"{MODULE}._args_: found 3", "keywords"]),
    "no list of modules": ({MODULE: {"_target_": "torch.nn.Sequential", "_args_": None}}, ["a list of modules"]),
    "weights": (
        {MODULE: _sequential({"_target_": "mlotool.models.torchvision_model", "name": "resnet18", "weights": "X"})},
        [f"{MODULE}._args_[0].weights: found 'X'", "downloads"],
    ),
}


@pytest.mark.parametrize("case", MISPLACED)
def test_what_stands_in_the_wrong_place(case: str, changed: Change) -> None:
    changes, parts = MISPLACED[case]
    for message in (message_of(check, changed(changes)), message_of(build, changed(changes))):
        assert all(part in message for part in parts), message


def test_a_recipe_cannot_download_by_position(write_recipe: Callable[..., Path], folder: Path) -> None:
    cifar10 = (
        "{_target_: mlotool.data.CIFAR10, _args_: [evil, {train: 10}, 10, [3, 32, 32], 0, null, null, true, true]}"
    )
    write_recipe(f"defaults: [plain, _self_]\ndata: {cifar10}\n", name="as_data")
    write_recipe(
        "defaults: [plain, _self_]\n"
        "problems: {classifier: {module: {_target_: torch.nn.Sequential, _args_: [" + cifar10 + "]}}}\n",
        name="as_layer",
    )
    assert "data._args_: found" in message_of(build, compose("as_data"))
    message = message_of(build, compose("as_layer"))
    assert f"{MODULE}._args_[0]._target_: found 'mlotool.data.CIFAR10', which is no module" in message
    assert not (folder / "evil").exists()


def test_modules_in_modules_and_schedulers_in_schedulers(changed: Change) -> None:
    chain = {"_target_": "torch.optim.lr_scheduler.ChainedScheduler", "schedulers": [SCHEDULER]}
    check(changed({MODULE: _sequential(_sequential(MODEL)), "problems.classifier.scheduler": chain}), targets=True)


@pytest.mark.parametrize("kind", ["optimizer", "module", "scheduler"])
def test_no_far_name_is_suggested(kind: str) -> None:
    assert "Did you mean" not in str(trust_fault("key", "torch.load", kind))
