"""Which runs have programs of equal structure, by their configs. No torch."""

import json
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

_OF_A_RUN = (
    "seed",
    "name",
    "runner",
    "evaluate",
    "objective",
    "objective_mode",
    "analyses",
    "logger",
    "sweep",
    "resume",
    "inherit",
    "decisions_from",
)
"""Parts of a config that say nothing of the program's structure."""

_OF_A_STEP = ("optimizer", "scheduler", "scheduler_interval", "gradient_clip_norm")
"""Settings of a problem that concern its own steps alone."""


def structure_of(config: Any) -> str:
    """Return a text that is the same for configs whose programs differ in no more than numbers.

    Those are seeds, numbers of the data and of losses, and what concerns steps: optimizers, schedulers, clipping.

    Args:
        config: a composed config.

    Example:
        >>> from mlotool.config import compose
        >>> words = ("seed=0", "seed=1", "problems.classifier.stream.batch_size=10")
        >>> first, second, third = (structure_of(compose("plain", [word])) for word in words)
        >>> first == second, first == third
        (True, False)
    """
    plain: Any = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    found = {key: value for key, value in plain.items() if key not in _OF_A_RUN}
    found["data"] = _without_numbers(found.get("data"))
    found["problems"] = {
        name: {
            key: _without_numbers(value) if key == "loss" else value
            for key, value in problem.items()
            if key not in _OF_A_STEP or _is_search(value)
        }
        for name, problem in found["problems"].items()
    }
    found["trace"] = plain["runner"].get("trace")
    return json.dumps(_without_seeds(found), sort_keys=True, default=str)


def _is_search(value: Any) -> bool:
    """Return whether a node is an optimizer that evaluates the loss itself, and so runs by itself."""
    return isinstance(value, Mapping) and str(value.get("_target_")).endswith(".LBFGS")


def _without_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_numbers(each) for each in value]
    return "a number" if isinstance(value, int | float) and not isinstance(value, bool) else value


def _without_seeds(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_seeds(each) for key, each in value.items() if key != "seed"}
    return [_without_seeds(each) for each in value] if isinstance(value, list) else value
