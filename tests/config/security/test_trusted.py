import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from pytorch_lightning import callbacks

from mlotool.config import build, check, trust
from mlotool.config.security.trusted import resolve, trust_fault, trusted_names
from mlotool.core.messages import command_line
from tests.config.conftest import message_of

Change = Callable[[dict[str, Any]], DictConfig]
HOSTILE = [
    *("os.system", "builtins.eval", "pickle.loads", "torch.load", "torch.hub.load", "", "eval"),
    *("torch.nn.modules.module.torch.load", "torchvision.datasets.folder.os.system", "torchvision.models.resnet18"),
    *("torchmetrics.utilities.imports.shutil.rmtree", "mlotool.data.cifar10.datasets.CIFAR10"),
    *("mlotool.config.provenance.subprocess.run", "mlotool.runner.run.run", "mlotool.losses.cross_entropy.torch.load"),
    *("hydra.utils.instantiate", "torch.nn.Linear.__init__.__globals__"),
]
PLACES = ("module", "loss", "optimizer", "scheduler", "hypergradient", "module.inner")


@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_target_gets_through(name: str, changed: Change) -> None:
    keys = [f"problems.classifier.{place}" for place in PLACES]
    for key in keys if name == "os.system" else keys[:1]:
        message = message_of(check, changed({key: {"_target_": name}}))
        assert f"{key}._target_: found '{name}'" in message
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


def test_trusted_names_are_there() -> None:
    for name in trusted_names():
        assert resolve("key", name).__name__ == name.rpartition(".")[2]


def test_models_of_torchvision_have_a_function() -> None:
    words = "{_target_: mlotool.models.torchvision_model, name: resnet18, num_classes: .., image_shape: ..}"
    assert f"For it write {words}." in str(trust_fault("key", "torchvision.models.resnet18", "module"))
    assert "torchvision_model" not in str(trust_fault("key", "torchvision.models.resnet18", "optimizer"))


def test_each_callback_of_lightning_may_be_named_or_is_told_why_not() -> None:
    bases = {"BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "ProgressBar"}
    for name in set(callbacks.__all__) - bases:
        assert "not trusted" not in (trust_fault("key", f"pytorch_lightning.callbacks.{name}", "callback") or "")


def test_a_close_name_is_suggested() -> None:
    assert "Did you mean 'torch.optim.SGD'?" in str(trust_fault("key", "torch.optim.sgd.SGD", "optimizer"))
    assert "Did you mean 'mlotool.models.WeightNet'?" in str(trust_fault("key", "mlotool.models.WeigthNet", "module"))
    assert "Did you mean" not in str(trust_fault("key", "torch.load", "module"))


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
        "    def __init__(self, image_shape: list[int], num_classes: int) -> None:\n"
        "        super().__init__(64, num_classes)\n\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.flatten(1))\n"
    )
    return name


def test_an_own_package_is_trusted_by_name(own_package: str, changed: Change) -> None:
    node = {"_target_": f"{own_package}.Net", "num_classes": 10, "image_shape": [1, 8, 8]}
    config = changed({"problems.classifier.module": node})
    assert f"trust=['{own_package}']" in message_of(check, config)
    with command_line():
        assert f"--trust {own_package}" in message_of(check, config)
    assert f"Did you mean '{own_package}'?" in message_of(trust, own_package[:-1])
    trust(own_package)
    assert check(config) == []
    assert type(build(config).program.problems["classifier"].module).__name__ == "Net"


@pytest.mark.parametrize("target", ["os.system", "load", "nets.torch.load", "Nothing", "os"])
def test_trust_ends_at_the_package(target: str, own_package: str) -> None:
    trust(own_package)
    message = message_of(resolve, "problems.classifier.module", f"{own_package}.{target}")
    assert f"problems.classifier.module._target_: found '{own_package}.{target}'" in message


@pytest.mark.parametrize("package", ["os", "torch", "mlotool", "a.b", "../x", "", "nowhere_xyz"])
def test_what_cannot_be_trusted(package: str, folder: Path) -> None:
    assert f"trust=['{package}']" in message_of(trust, package)
    with command_line():
        assert f"--trust {package}" in message_of(trust, package)


CIFAR10 = {"_target_": "mlotool.data.CIFAR10", "_args_": ["elsewhere", {"train": 10}, 10, [3, 32, 32], 0, None, None]}
MODEL = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}
SCHEDULER = {"_target_": "torch.optim.lr_scheduler.ConstantLR"}
MODULE = "problems.classifier.module"


def _sequential(*layers: Any) -> dict[str, Any]:
    return {"_target_": "torch.nn.Sequential", "_args_": list(layers)}


WEIGHTS = {"_target_": "mlotool.models.torchvision_model", "name": "resnet18", "weights": "X"}
CLASSIFIER, SOLVER = "problems.classifier", "hypergradient.solver"
MISPLACED: list[tuple[str, Any, str]] = [
    (MODULE, _sequential(_sequential(MODEL, CIFAR10)), f"{MODULE}._args_[0]._args_[1]._target_: found"),
    (f"{MODULE}.roles", CIFAR10, f"{MODULE}.roles._target_"),
    (f"{MODULE}.hidden", {"a": [CIFAR10]}, f"{MODULE}.hidden.a[0]._target_"),
    (f"{CLASSIFIER}.loss.x", CIFAR10, f"{CLASSIFIER}.loss.x._target_"),
    (f"{CLASSIFIER}.scheduler", {**SCHEDULER, "factor": MODEL}, "no scheduler"),
    (f"{CLASSIFIER}.optimizer.lr", MODEL, "plain values"),
    ("data.root", CIFAR10, "plain values"),
    ("data", {"_target_": "mlotool.data.corrupt_labels"}, "not trusted"),
    (SOLVER, {"_target_": "mlotool.hypergradient.FirstOrder"}, "no solver"),
    ("hypergradient", {"_target_": "mlotool.hypergradient.Identity"}, "no hypergradient"),
    ("data", CIFAR10, "data._args_: found"),
    (f"{CLASSIFIER}.optimizer._args_", [[], 0.1], "expected keywords"),
    (MODULE, {"_target_": "torch.nn.Sequential", "_args_": None}, "takes a list of modules"),
    (MODULE, _sequential(WEIGHTS), f"{MODULE}._args_[0].weights: found 'X'"),
]


@pytest.mark.parametrize(("key", "node", "part"), MISPLACED)
def test_what_stands_in_the_wrong_place(key: str, node: Any, part: str, changed: Change) -> None:
    config = changed({key: node})
    assert part in message_of(check, config)
    assert part in message_of(build, config)
