from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from mlotool.config import compose, register_sources
from mlotool.config.security import trusted
from mlotool.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trusted, "_packages", {})
    yield
    register_sources()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write_recipe(folder: Path) -> Callable[..., Path]:
    """Writes ./recipes/<name>.yaml."""

    def write(body: str, name: str = "mine", header: str = "# @package _global_\n# Mine.\n") -> Path:
        path = folder / "recipes" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(header + body)
        return path

    return write


@pytest.fixture(scope="session")
def composed() -> DictConfig:
    return compose("mwn")


@pytest.fixture
def changed(composed: DictConfig) -> Callable[[dict[str, Any]], DictConfig]:
    """The recipe mwn with dotted keys changed."""

    def change(changes: dict[str, Any]) -> DictConfig:
        config = composed.copy()
        with open_dict(config):
            for key, value in changes.items():
                OmegaConf.update(config, key, value, merge=False, force_add=True)
        return config

    return change


def message_of(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """The text of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **keywords)
    return str(caught.value)
