"""Options of the working folder: ./conf/<group>/<name>.yaml."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mlotool.config import check, compose
from mlotool.config.recipes import option_names, options_folder, own_options, package_dir
from mlotool.config.sweeps.sweep_plan import read_sweep
from tests.config.conftest import message_of

MODEL = """_target_: mlotool.models.MLP
image_shape: ${data.image_shape}
num_classes: ${data.num_classes}
hidden: [7]
"""
DATA = """_target_: mlotool.data.Digits
num_classes: 10
image_shape: [1, 8, 8]
sizes: {train: 900, meta: 100, val: 200, test: 597}
seed: ${seed}
"""
CHOICE = "model@problems.classifier.module"


@pytest.fixture
def write(folder: Path) -> Callable[..., Path]:
    """Writes ./conf/<path>.yaml."""

    def write_one(path: str, text: str) -> Path:
        file = folder / "conf" / f"{path}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write_one


@pytest.mark.parametrize(
    ("path", "text", "word", "key", "value"),
    [
        ("data/mine", DATA, "data=mine", "data.sizes.train", 900),
        ("model/mine", MODEL, f"{CHOICE}=mine", "problems.classifier.module.hidden", [7]),
        ("runner/mine", "keep_checkpoints: 7\n", "runner=mine", "runner.keep_checkpoints", 7),
        ("sweep/mine", "params: {seed: '0,1'}\n", "sweep=mine", "sweep.params.seed", "0,1"),
    ],
)
def test_every_group_has_them(
    write: Callable[..., Path], path: str, text: str, word: str, key: str, value: Any
) -> None:
    write(path, text)
    config = compose("mwn", [word])
    found: Any = OmegaConf.select(config, key)
    assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value
    check(config)


def test_recipes_choose_them(write: Callable[..., Path], write_recipe: Callable[..., Path]) -> None:
    write("data/mine", DATA)
    write("model/mine", MODEL)
    body = f"defaults: [mwn, _self_, override /data: mine, override /{CHOICE}: mine]\n"
    file = write_recipe(body)
    for config in (compose("mine"), compose(str(file))):
        assert config.data.sizes.train == 900
        assert list(config.problems.classifier.module.hidden) == [7]


def test_sweeps_know_them(write: Callable[..., Path]) -> None:
    write("data/mine", DATA)
    write("sweep/mine", "method: grid\nparams: {data: 'mine,digits'}\n")
    [dimension] = read_sweep(["+recipe=mwn", "sweep=mine"]).dimensions
    assert dimension.choices == ("mine", "digits")
    assert own_options("data") == ["mine"]
    assert {"mine", "digits"} < set(option_names("data"))


def test_a_checkout_has_its_conf_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package_dir("conf").parent)
    assert options_folder() is None
    assert own_options("data") == []
    assert compose("mwn", ["data=digits"]).data.sizes.train == 1000


def test_no_name_of_a_built_in_option(write: Callable[..., Path]) -> None:
    write("data/digits", DATA)
    assert "found conf/data/digits.yaml, a built-in option's name" in message_of(compose, "mwn", ["data=digits"])
    # What a built-in option inherits from is the built-in one, and a copy hides nothing.
    assert compose("mwn", ["data=digits_noisy"]).data.sizes.train == 1000
    write("data/digits", (package_dir("conf") / "data" / "digits.yaml").read_text())
    assert compose("mwn", ["data=digits"]).data.sizes.train == 1000


NO_OPTIONS = [
    ("- a\n", "conf/data/mine.yaml: found a list at the top; expected keys"),
    ("root: here\n", "conf/data/mine.yaml: found no '_target_'; expected an option like those in"),
    ("defaults: [digits, _self_]\n", "conf/data/mine.yaml: found the key 'defaults'"),
    (f"# @package data\n{DATA}", "conf/data/mine.yaml: found the header '# @package data'; expected"),
]


@pytest.mark.parametrize(("text", "message"), NO_OPTIONS)
def test_one_clear_message(write: Callable[..., Path], text: str, message: str) -> None:
    write("data/mine", text)
    found = message_of(compose, "mwn", ["data=mine"])
    assert message in found and len(found.splitlines()) == 1


REFUSED = [
    ("data/mine", f"{DATA}root: /etc\n", "data=mine", "data.root"),
    ("data/mine", f"{DATA}download: true\n", "data=mine", "data.download"),
    ("model/mine", f"{MODEL}weights: here.pt\n", f"{CHOICE}=mine", "problems.classifier.module.weights"),
    # Where it is placed counts, not where it lies.
    ("runner/mine", "mode: online\n", "+runner@logger=mine", "logger.mode"),
    ("sweep/mine", "params: {logger.mode: 'online,offline'}\n", "sweep=mine", "sweep.params, 'logger.mode'"),
    ("data/mine", f"{DATA}x: !!python/name:os.system\n", "data=mine", "the YAML tag"),
    ("data/mine", f"{DATA}x: [{'1, ' * 1001}]\n", "data=mine", "more than 1000 values"),
]


@pytest.mark.parametrize(("path", "text", "word", "key"), REFUSED)
def test_the_rules_for_recipes(write: Callable[..., Path], path: str, text: str, word: str, key: str) -> None:
    write(path, text)
    message = message_of(compose, "mwn", [word])
    assert message.startswith(f"conf/{path}.yaml: ") and key in message


def test_links_and_pipes_are_none(write: Callable[..., Path], folder: Path) -> None:
    secret = folder / "secret.yaml"
    secret.write_text(f"{DATA}a_secret: 1\n")
    write("data/mine", DATA).unlink()
    (folder / "conf" / "data" / "link.yaml").symlink_to(secret)
    os.mkfifo(folder / "conf" / "data" / "pipe.yaml")
    write("data/${oc.env:HOME}", DATA)
    (folder / "conf" / "model").symlink_to(folder)
    assert [own_options(group) for group in ("data", "model")] == [[], []]
    for word in ("data=link", "data=pipe", "+model@problems.x.module=secret"):
        message = message_of(compose, "mwn", [word])
        assert "a_secret" not in message
