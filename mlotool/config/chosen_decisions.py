"""`decisions: <folder>`: what a run has found takes the place of the folder when a config is composed."""

from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from mlotool.config.found_decisions import ARCHITECTURES, found_decisions
from mlotool.core.errors import ConfigError

KEY, FOLDER_KEY = "decisions", "decisions_from"
_SPACE = "mlotool.spaces.Space"


def fill_decisions(config: DictConfig) -> None:
    """Write the decisions of a folder into a config, in place; those that it has by name stay.

    Its shared spaces become the models of these decisions.

    Args:
        config: as it was composed.

    Raises:
        ConfigError: the folder has no decisions, or a problem of the config gives a shared space its path.
    """
    folder = config.get(FOLDER_KEY)
    if not isinstance(folder, str):
        return
    modules = dict(_modules(config))
    chooser = next((name for name, module in modules.items() if module.get("_target_") in ARCHITECTURES), None)
    if chooser is not None:
        raise ConfigError(
            f"decisions: found the folder '{folder}' in a recipe whose problem '{chooser}' chooses the paths of a "
            "shared space; expected one that trains one model. Take a recipe of the same "
            "space without that problem, or leave decisions out."
        )
    found = found_decisions(Path(folder))
    with open_dict(config):
        config[KEY] = {**found, **{str(name): config[KEY]._get_node(name)._value() for name in config[KEY]}}
    for module in modules.values():
        if module.get("_target_") == _SPACE and "shared" in module:
            with open_dict(module):
                module.shared = False
                module.paths = None


def _modules(config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    for name, problem in config.problems.items():
        if OmegaConf.is_missing(problem, "module"):
            continue
        module = problem.module
        if isinstance(module, DictConfig):
            yield str(name), module
