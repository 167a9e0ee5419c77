"""The options in conf/: they fit their targets, and what they write out as literals is true."""

import inspect
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from mlotool.config.security.trusted import trusted_names

CONF = Path(__file__).parents[2] / "conf"
DATA_OPTIONS = sorted(path.stem for path in (CONF / "data").glob("*.yaml"))
MODEL_OPTIONS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))


def _load(group: str, option: str) -> DictConfig:
    config = OmegaConf.load(CONF / group / f"{option}.yaml")
    assert isinstance(config, DictConfig)
    bases = [_load(group, name) for name in config.pop("defaults", []) if name != "_self_"]
    merged = OmegaConf.merge(*bases, config)
    assert isinstance(merged, DictConfig)
    return merged


def resolved(group: str, option: str, data: str = "digits", changes: Sequence[str] = ()) -> tuple[Any, dict[str, Any]]:
    """Return the target of an option beside some data, and what it is called with."""
    node = OmegaConf.merge(_load(group, option), OmegaConf.from_dotlist(list(changes)))
    root = OmegaConf.create({"seed": 0, "data": _load("data", data), "node": node})
    keywords: Any = OmegaConf.to_container(root.node, resolve=True)
    home, _, name = keywords.pop("_target_").rpartition(".")
    return getattr(import_module(home), name), keywords


@pytest.mark.parametrize("option", DATA_OPTIONS)
def test_data_options_fit_their_targets_and_may_be_named(option: str) -> None:
    target, keywords = resolved("data", option)
    inspect.signature(target).bind(**keywords)
    assert _load("data", option)["_target_"] in trusted_names("data")


@pytest.mark.parametrize("option", MODEL_OPTIONS)
def test_model_options_fit_their_targets(option: str) -> None:
    text = "data.vocabulary_size" in (CONF / "model" / f"{option}.yaml").read_text()
    data = "python_text" if option == "mixture_weights" else "synthetic_text" if text else "digits"
    target, keywords = resolved("model", option, data)
    # A model of its own inside, which the recipe chooses.
    keywords |= {"decoder": None} if option == "sequence_weigher" else {}
    inspect.signature(target).bind(**keywords)


EMBEDDED = ("digits", "two_domains", "synthetic", "sinusoid", "peaks", "python")
# Said in the headers; the sizes of the options count what is left out as well.
TRAIN_SIZES = {"digits_longtailed": 339, "synthetic_text": 993}


@pytest.mark.parametrize("option", [option for option in DATA_OPTIONS if option.startswith(EMBEDDED)])
def test_embedded_options_build_what_they_say(option: str) -> None:
    target, keywords = resolved("data", option)
    data = target(**keywords)
    expected = dict(keywords["sizes"])
    if option in TRAIN_SIZES:
        expected["train"] = TRAIN_SIZES[option]
    assert {name: len(data.split(name)) for name in data.splits} == expected
    # Of a language model the classes are the tokens.
    assert data.num_classes == keywords.get("num_classes", keywords.get("vocabulary_size"))
