"""From a recipe's name and overrides to one config."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mlotool.config.booleans import check_overrides
from mlotool.config.paths import GROUP, package_dir
from mlotool.config.provenance import Origin
from mlotool.config.reading import leaves, read_document
from mlotool.config.recipes import find_recipe, recipe_argument
from mlotool.config.safety import check_recipe_file
from mlotool.config.schema import Config
from mlotool.config.sources import sources
from mlotool.config.translation import translate
from mlotool.core.errors import ConfigError

CONFIG_NAME = "config"
# Hydra 1.3 warns without it, 1.4 with it.
VERSION_KEYWORDS: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
_origins: dict[int, Origin] = {}


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
    check_overrides(overrides)
    argument, folders = recipe_argument(recipe)
    path = _recipe_path(recipe, overrides, folders)
    with sources(folders):
        if path is not None:
            check_recipe_file(path)
    with sources(folders), config_errors(), initialize_config_dir(str(package_dir("conf")), **VERSION_KEYWORDS):
        config = hydra_compose(CONFIG_NAME, [*argument, *overrides])
    _keep_origin(config, Origin(_call(recipe, overrides), tuple(overrides), path))
    return config


def origin_of(config: Any) -> Origin | None:
    """Return where a config that `compose` made came from; None for any other, a copy of one too."""
    return _origins.get(id(config))


def _keep_origin(config: DictConfig, origin: Origin) -> None:
    # By identity, not in a WeakKeyDictionary: a DictConfig's hash is that of its values, which may be changed.
    _origins[id(config)] = origin
    weakref.finalize(config, _origins.pop, id(config), None)


def _call(recipe: str | None, overrides: Sequence[str]) -> str:
    return f"mlotool.run(mlotool.compose({recipe!r}, {list(overrides)!r}))"


def _recipe_path(recipe: str | None, overrides: Sequence[str], folders: Sequence[Path]) -> Path | None:
    if recipe is not None:
        return folders[0] / Path(recipe).name if folders else find_recipe(recipe)
    names = [word.partition("=")[2].strip("'\"") for word in overrides if word.lstrip("+").startswith(f"{GROUP}=")]
    if names:
        # Several, in a list, are no one file, and null is none.
        with suppress(ConfigError):
            return find_recipe(names[-1])
    return None


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
    data = read_document(path).data
    for key, value in leaves(data):
        if isinstance(value, str) and "${" in value:
            # Every reference was resolved when it was written; what looks like one now was put there.
            raise ConfigError(
                f"{path}: {key}: found {value!r}; expected plain values, as a run writes them. Write the value."
            )
    with config_errors(path):
        config = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(data))
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
