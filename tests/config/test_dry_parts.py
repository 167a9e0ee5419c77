"""What data, modules and the program refuse is found before a run, without one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from mlotool.config import check, compose, trusted
from tests.config.conftest import message_of

Change = Callable[[dict[str, Any]], DictConfig]
MODULE, OPTIMIZER = "problems.classifier.module", "problems.classifier.optimizer"

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "classes": ({"data.num_classes": 7}, "data.num_classes=7; expected 10, the number of classes that the data has"),
    "kind of noise": (
        {"data.label_noise.kind": "flp"},
        "data.label_noise.kind: found 'flp'; expected one of uniform, flip",
    ),
    "too many samples": ({"data.sizes.train": 5000}, "data.sizes"),
    "depth": (
        {MODULE: {"_target_": "mlotool.models.ResNet", "depth": 9, "image_shape": [1, 8, 8], "num_classes": 10}},
        f"{MODULE}: ",
    ),
    "too large": ({f"{MODULE}.hidden": [10**9, 10**9]}, f"{MODULE}: its parameters take 4,000,000"),
    "group": ({f"{OPTIMIZER}.groups": [{"match": "nothing.*", "lr": 0.1}]}, f"{OPTIMIZER}.groups"),
    "no block": (
        {"problems.classifier.remat": ["layer.*"]},
        "problems.classifier.remat: found 'layer.*'; expected a path of submodules of MLP, in which * is any text",
    ),
    "no blocks": (
        {"problems.classifier.remat": "auto"},
        "problems.classifier.remat: found 'auto'; expected auto with repeated blocks",
    ),
    "no parameters": ({MODULE: {"_target_": "torch.nn.Flatten"}}, f"{OPTIMIZER}: torch.optim.sgd.SGD does not accept"),
    "layers": (
        {"problems.classifier.parallel": {"_target_": "mlotool.layerparallel.Multigrid"}},
        "problems.classifier.parallel.part: found no equal blocks that follow each other in MLP",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_part_refuses_is_found(name: str, changed: Change) -> None:
    changes, part = REFUSED[name]
    message = message_of(check, changed(changes), targets=True, parts=True)
    assert part in message
    assert len(message.splitlines()) == 1


def test_metrics_of_classification_want_classes(folder: Path, changed: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "class Data:\n    splits = ('train', 'meta', 'val', 'test')\n    split = lambda self, name: [{'input': 1.0}]\n"
    )
    (folder / "without_classes.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    trusted.trust("without_classes")
    module = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}
    changes = {"data": {"_target_": "without_classes.Data"}, MODULE: module}
    message = message_of(check, changed(changes), targets=True, parts=True)
    assert message.startswith("evaluate.metrics: found 'accuracy', which needs classes; the data has num_classes=None.")
    assert len(message.splitlines()) == 1


def test_faults_of_parts_come_with_all_others(changed: Change) -> None:
    changes = {"data.num_classes": 7, "problems.reweight.stream.split": "mta", f"{OPTIMIZER}.lr": -1.0}
    keys = [
        line.partition(": ")[0] for line in message_of(check, changed(changes), targets=True, parts=True).split("\n")
    ]
    assert set(keys[:2]) == {f"{OPTIMIZER}.lr", "problems.reweight.stream.split"}
    assert keys[2].startswith("data.num_classes=7")


def test_a_sound_recipe_stays_sound_and_draws_no_random_numbers(composed: DictConfig) -> None:
    before = torch.random.get_rng_state()
    check(composed, targets=True, parts=True)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_nothing_is_downloaded_and_no_missing_file_opened(folder: Path) -> None:
    check(compose("mwn_cifar10"), targets=True, parts=True)
    check(compose("mwn_cifar10", ["data.download=true"]), targets=True, parts=True)
    assert not list(folder.iterdir())
