"""Sizes that follow from a folder of texts."""

from pathlib import Path

import pytest

from mlotool.config import check, compose
from mlotool.config.composition import with_values
from mlotool.core.errors import ConfigError
from tests.data.test_texts import install_fake

FOLDER = ["data=text_folder", "data.path=texts"]


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        (tmp_path / "texts" / name / "one.txt").write_text(f"all of {name}")
    (tmp_path / "texts" / "empty.txt").touch()


def test_domains_are_counted() -> None:
    config = compose("lm_data_mixture", [*FOLDER, "problems.mixture.module.size=${data.num_domains}"])
    check(config)
    assert (config.problems.mixture.module.size, config.problems.model.module.vocabulary_size) == (3, 256)
    copied = with_values(config, ["data.path=texts/a/one.txt"])
    assert copied is not None
    assert (copied.data.num_domains, config.data.num_domains) == (1, 3)
    assert compose("lm_plain", [*FOLDER, "data.domains=[c,a]"]).data.num_domains == 2
    assert compose("lm_plain", [*FOLDER, "data.num_domains=7"]).data.num_domains == 7
    assert compose("lm_plain", ["data=text_folder"]).data.num_domains == 1  # no such folder: the data will say


def test_tokens_are_the_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake(monkeypatch, 1000)
    for words, size in ((["data.tokenizer=texts"], 1000), (["data.tokenizer=absent"], 256), ([], 256)):
        config = compose("lm_plain", [*FOLDER, *words])
        assert (config.data.vocabulary_size, config.problems.model.module.vocabulary_size) == (size, size)
    assert (
        compose("mwn_text", ["data=wrench", "data.tokenizer=texts"]).problems.classifier.module.vocabulary_size == 1000
    )
    assert compose("mwn_text", ["data=wrench"]).data.vocabulary_size == 10000


@pytest.mark.parametrize(
    "words",
    [["data.shares.train={a: 3, b: 1}"], ["data.shares={train: {a: 3, b: 1}}"], ["data.shares.train.a=3",
     "data.shares.train.b=1"], ["+data.shares.train={a: 3, b: 1}"]],
)  # fmt: skip
def test_shares_are_set_by_the_users_names(words: list[str]) -> None:
    config = compose("lm_plain", [*FOLDER, *words])
    check(config)
    assert config.data.shares == {"train": {"a": 3, "b": 1}}


def test_a_recipe_cannot_write_such_a_reference(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\ndefaults: [lm_plain, _self_]\nseed: ${num_tokens:/etc,3}\n")
    with pytest.raises(ConfigError, match=r"seed: found '\$\{num_tokens:/etc,3\}'; expected a single reference"):
        compose(str(file))
