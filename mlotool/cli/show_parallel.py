"""What `mlotool show RECIPE --parallel` prints: how fast layer-parallel problems are to be expected to be."""

import sys
from collections.abc import Mapping
from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.core.messages import escape

NUM_TICKS = 3


def show_parallel(config: Any) -> None:
    """Build a recipe, train it for a few ticks in this process, and print what its `parallel:` nodes promise.

    Args:
        config: a composed one; all that a run checks of it is checked here.

    Raises:
        ConfigError: no problem is layer-parallel, or the recipe cannot be built.
    """
    from omegaconf import OmegaConf, open_dict

    from mlotool import config as configs
    from mlotool.config.checks import build
    from mlotool.program import Schedule

    names = parallel_problems(OmegaConf.to_container(config.problems, resolve=False))
    if not names:
        raise ConfigError(
            "--parallel: found no problem with a parallel setting; expected one. Add one, as in "
            f"+parallel@problems.{next(iter(config.problems))}.parallel=penalty, or leave --parallel out."
        )
    for warning in configs.check(config, targets=True):
        print(f"mlotool: warning: {escape(warning)}", file=sys.stderr)
    for name in names:
        node = config.problems[name].parallel
        if str(node.get("_target_")).rpartition(".")[2] == "Auxiliary":
            with open_dict(node):
                node.record = NUM_TICKS
    program = build(config).program
    schedule = Schedule(program)
    for _ in range(NUM_TICKS):
        schedule.tick()
    for name in names:
        parallel = program.problems[name].parallel
        for line in () if parallel is None else parallel.forecast():
            print(escape(f"{name}: {line}"))


def parallel_problems(problems: Any) -> list[str]:
    """Return the names of the problems that have a `parallel:` node.

    Args:
        problems: the config's, as plain values.

    Example:
        >>> parallel_problems({"a": {"parallel": {"stages": 2}}, "b": {"parallel": None}})
        ['a']
    """
    return [name for name, each in problems.items() if isinstance(each, Mapping) and each.get("parallel")]
