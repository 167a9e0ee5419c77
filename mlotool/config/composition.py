"""From a recipe's name and overrides to one config."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mlotool.config.paths import package_dir
from mlotool.config.recipes import recipe_argument
from mlotool.config.schema import Config
from mlotool.config.sources import sources
from mlotool.config.translation import translate
from mlotool.core.errors import ConfigError

CONFIG_NAME = "config"
# Hydra 1.3 warns without it, 1.4 with it.
VERSION_KEYWORDS: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


def compose(recipe: str | None, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose a config with Hydra: built-in defaults, then the recipe, then the overrides.

    Args:
        recipe: a recipe's name, or the path of its file; None where an override `+recipe=..` names it, or none is
            wanted.
        overrides: as on the command line.

    Returns:
        The config; interpolations are resolved where they are read.

    Raises:
        ConfigError: it cannot be composed. `check` finds what is wrong with its values.

    Example:
        >>> compose("mwn", ["hypergradient=cg", "seed=1"]).seed
        1
    """
    argument, folders = recipe_argument(recipe)
    with sources(folders), config_errors(), initialize_config_dir(str(package_dir("conf")), **VERSION_KEYWORDS):
        return hydra_compose(CONFIG_NAME, [*argument, *overrides])


def load_run_config(run_dir: Path | str) -> DictConfig:
    """Return the config of a run folder.

    Raises:
        ConfigError: there is no config.yaml, or it is none of ours.
    """
    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise ConfigError(
            f"'{run_dir}' has no config.yaml; expected the folder of a run, outputs/<name>/<date>_<time>. "
            "Give the folder that `mlotool run` printed."
        )
    with config_errors(path):
        config = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
    assert isinstance(config, DictConfig)
    return config


@contextmanager
def config_errors(path: Path | None = None) -> Iterator[None]:
    """Turn the errors of Hydra, OmegaConf and YAML into ConfigErrors, without their tracebacks."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        translated = translate(error)
        raise (translated if path is None else ConfigError(f"{path}: {translated}")) from None


def plain(node: Any) -> Any:
    """Return a config as dicts, lists and scalars, with every interpolation resolved."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
