"""From a recipe's name and overrides to one config."""

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
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
from mlotool.config.composition_faults import collected_faults
from mlotool.config.paths import GROUP, package_dir
from mlotool.config.provenance import Origin
from mlotool.config.recipes import find_recipe, recipe_argument
from mlotool.config.safety import check_recipe_file
from mlotool.config.sources import sources
from mlotool.config.translation import translate
from mlotool.config.trusted import trust_all
from mlotool.core.arguments import is_path, require, require_texts
from mlotool.core.errors import ConfigError
from mlotool.core.messages import MAX_FAULTS, fault_list, shown

CONFIG_NAME = "config"
# Hydra 1.3 warns without it, 1.4 with it.
VERSION_KEYWORDS: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
_origins: dict[int, Origin] = {}


def compose(
    recipe: str | os.PathLike[str] | None, overrides: Sequence[str] = (), *, trust: Sequence[str] = ()
) -> DictConfig:
    """Compose a config with Hydra: built-in defaults, then the recipe, then the overrides.

    Args:
        recipe: a recipe's name, or the path of its file; None where an override `+recipe=..` names it, or none is
            wanted.
        overrides: as on the command line.
        trust: packages of yours that the recipe may name, from now on in this process; found in the working directory
            or on the import path.

    Returns:
        The config; interpolations are resolved where they are read.

    Raises:
        ConfigError: it cannot be composed, or there is no such package. `check` finds what is wrong with its values.

    Example:
        >>> compose("mwn", ["hypergradient=cg", "seed=1"]).seed
        1
    """
    recipe = os.fspath(recipe) if isinstance(recipe, os.PathLike) else recipe
    _check_kinds(recipe, overrides, trust)
    trust_all(trust)
    check_overrides(overrides)
    argument, folders = recipe_argument(recipe)
    path = _recipe_path(recipe, overrides, folders)
    with sources(folders):
        if path is not None:
            check_recipe_file(path)
    with sources(folders):
        first: ConfigError | None = None
        try:
            config = _composed(argument, overrides)
        except ConfigError as error:
            first = error
        # Not while the first is handled: it would be the context of the others, and taken for their cause.
        if first is not None:
            raise _all_faults(first, argument, overrides)
    _keep_origin(config, Origin(_call(recipe, overrides, trust), tuple(overrides), path))
    return config


def _check_kinds(recipe: Any, overrides: Any, trust: Any) -> None:
    if not isinstance(recipe, str | None):
        raise ConfigError(
            f"compose.recipe: found {shown(recipe)}; expected a name, such as 'mwn', or the path of a file. Write "
            "compose('mwn')."
        )
    require_texts("compose.overrides", overrides, "seed=1")
    require_texts("compose.trust", trust, "mymodels")


def check_composed(config: Any) -> None:
    """Refuse what is no composed config: a recipe's name, plain dicts, a part of one.

    Raises:
        ConfigError: it is none.
    """
    advice = "Write mlotool.run(mlotool.compose('mwn'))."
    if is_path(config):
        advice = f"Write mlotool.run(mlotool.compose({os.fspath(config)!r}))."
    elif isinstance(config, Mapping):
        advice = (
            "Write what differs from a recipe as overrides, mlotool.run(mlotool.compose('mwn', ['seed=1'])), or all of "
            "it as a recipe file, mlotool.run(mlotool.compose('mine.yaml'))."
        )
    is_whole = isinstance(config, DictConfig) and "runner" in config
    require(is_whole, "run.config", config, "a config that mlotool.compose has returned", advice)


def _composed(argument: Sequence[str], overrides: Sequence[str]) -> DictConfig:
    with config_errors(), initialize_config_dir(str(package_dir("conf")), **VERSION_KEYWORDS):
        return hydra_compose(CONFIG_NAME, [*argument, *overrides])


def _all_faults(first: ConfigError, argument: Sequence[str], overrides: Sequence[str]) -> ConfigError:
    """Return the error of a composition with all other faults: it is tried again without what does not fit."""
    # Imported here: a composition that succeeds needs no checks.
    from mlotool.config.checks import check

    accepted: list[str] = []
    of_overrides: list[str] = []
    with collected_faults() as unfit:
        try:
            config = _composed(argument, ())
            for word in overrides[:MAX_FAULTS]:
                try:
                    config = _composed(argument, [*accepted, word])
                    accepted.append(word)
                except ConfigError as error:
                    of_overrides.append(str(error))
        except ConfigError:
            # What is wrong with the defaults list leaves nothing to look at.
            return first
    faults = [*unfit, *of_overrides] if len(unfit) + len(of_overrides) > 1 else [str(first)]
    try:
        check(config)
    except ConfigError as error:
        faults += str(error).splitlines()
    return ConfigError(fault_list(faults))


def origin_of(config: Any) -> Origin | None:
    """Return where a config that `compose` made came from; None for any other, a copy of one too."""
    return _origins.get(id(config))


def _keep_origin(config: DictConfig, origin: Origin) -> None:
    # By identity, not in a WeakKeyDictionary: a DictConfig's hash is that of its values, which may be changed.
    _origins[id(config)] = origin
    weakref.finalize(config, _origins.pop, id(config), None)


def _call(recipe: str | None, overrides: Sequence[str], trust: Sequence[str]) -> str:
    trusting = f", trust={list(trust)!r}" if trust else ""
    return f"mlotool.run(mlotool.compose({recipe!r}, {list(overrides)!r}{trusting}))"


def _recipe_path(recipe: str | None, overrides: Sequence[str], folders: Sequence[Path]) -> Path | None:
    if recipe is not None:
        return folders[0] / Path(recipe).name if folders else find_recipe(recipe)
    names = [word.partition("=")[2].strip("'\"") for word in overrides if word.lstrip("+").startswith(f"{GROUP}=")]
    if names:
        # Several, in a list, are no one file, and null is none.
        with suppress(ConfigError):
            return find_recipe(names[-1])
    return None


@contextmanager
def config_errors(path: Path | None = None) -> Iterator[None]:
    """Turn the errors of Hydra, OmegaConf and YAML into ConfigErrors, without their tracebacks."""
    try:
        yield
    # OmegaConf asserts that what a key is set in is a mapping.
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        translated = translate(error)
        raise (translated if path is None else ConfigError(f"{path}: {translated}")) from None


def plain(node: Any) -> Any:
    """Return a config as dicts, lists and scalars, with every interpolation resolved."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
