"""Built-in configs are read once a process, and every composition gets configs of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict

from mlotool.config import compose, paths, repository
from mlotool.config.repository import parsed_config
from mlotool.config.sources import register_sources

WORDS = ["hypergradient=cg", "seed=3"]


def _text(config: DictConfig) -> str:
    return OmegaConf.to_yaml(config)


def test_a_second_composition_is_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "_read", {})
    repository._pickled.cache_clear()
    first, second = compose("maml", WORDS), compose("maml", WORDS)
    assert repository._read
    assert first == second
    assert _text(first) == _text(second)
    assert OmegaConf.get_type(first) is OmegaConf.get_type(second)
    assert OmegaConf.is_struct(first) == OmegaConf.is_struct(second)


def test_it_reads_no_built_in_file_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compose("mwn", WORDS)

    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("parsed again")

    monkeypatch.setattr("omegaconf.OmegaConf.load", refuse)
    monkeypatch.setattr("yaml.load", refuse)
    assert compose("mwn", WORDS).seed == 3


def test_what_is_done_to_a_config_stays_with_it() -> None:
    first = compose("mwn")
    with open_dict(first):
        first.problems.classifier.optimizer.lr = 99.0
        first.evaluate.metrics.append("f1")
        del first.data["_target_"]
    second = compose("mwn")
    assert second.problems.classifier.optimizer.lr != 99.0
    assert "f1" not in second.evaluate.metrics
    assert "_target_" in second.data


def test_a_file_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = paths.package_dir("conf")
    copied = tmp_path / "built_in"
    for file in built_in.rglob("*.yaml"):
        place = copied / file.relative_to(built_in)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
    real = paths.package_dir

    def moved(name: str) -> Path:
        return copied if name == "conf" else real(name)

    for module in ("composition", "loader", "repository"):
        monkeypatch.setattr(f"mlotool.config.{module}.package_dir", moved)
    rate = compose("plain").problems.classifier.optimizer.lr
    sgd = copied / "optimizer" / "sgd.yaml"
    sgd.write_text(sgd.read_text().replace("nesterov: false", "nesterov: true"))
    changed = compose("plain").problems.classifier.optimizer
    assert changed.lr == rate
    assert changed.nesterov is True


def test_a_schema_that_is_stored_anew_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compose("plain")
    stored = ConfigStore.instance().repo
    node = stored["mlotool_schema.yaml"]
    other = type(node)(**{**vars(node), "node": node.node.copy()})
    other.node.seed = 77
    monkeypatch.setitem(stored, "mlotool_schema.yaml", other)
    assert compose("plain").seed == 77


def test_a_recipe_that_changes_is_read_again(write_recipe: Callable[..., Path]) -> None:
    write_recipe("defaults: [plain, _self_]\nseed: 1\n")
    assert compose("mine").seed == 1
    write_recipe("defaults: [plain, _self_]\nseed: 2\n")
    assert compose("mine").seed == 2


def test_a_text_is_what_omegaconf_reads() -> None:
    text = "a: 1e-3\nb: {c: 2026-01-01, d: [on, null, 0.1]}\ne: ${b.c}\n"
    for _ in range(2):
        assert parsed_config(text) == OmegaConf.create(text)
        # Each has its own.
        parsed_config(text).a = 5


def test_configs_that_others_register_are_read_anew(tmp_path: Path) -> None:
    """Also those that cannot be pickled, and that have equal values of other types."""

    @dataclass
    class Whole:
        size: int = 1

    @dataclass
    class Fraction:
        size: float = 1.0

    register_sources()
    (tmp_path / "app.yaml").write_text("x: 1\n")
    store = ConfigStore.instance()
    try:
        with hydra.initialize_config_dir(str(tmp_path), version_base=None):
            store.store(group="of_others", name="one", node=Whole)
            assert hydra.compose("app", overrides=["+of_others=one"]).of_others.size == 1
            store.store(group="of_others", name="one", node=Fraction)
            changed = hydra.compose("app", overrides=["+of_others=one", "of_others.size=2.5"])
            assert changed.of_others.size == 2.5
    finally:
        del store.repo["of_others"]
