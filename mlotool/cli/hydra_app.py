"""Hydra inside our process: its sources, its argv, its errors."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlotool import config
from mlotool.cli.arguments import Request

Task = Callable[[Any], float | None]


def open_sources(request: Request, trusted: Sequence[str] = ()) -> None:
    """Make a request's recipes known to Hydra, after refusing what no recipe may contain.

    Raises:
        ConfigError: no such recipe, or a recipe that is refused.
    """
    for package in trusted:
        config.trust(package)
    config.register_sources([] if request.file is None else [request.file.parent])
    # The source refuses the same when Hydra loads a recipe; here it happens before Hydra has started at all.
    for name in request.recipe_names():
        config.check_recipe_file(request.file or config.find_recipe(name))


def call_hydra(words: Sequence[str], task: Task, flags: Sequence[str] = ()) -> None:
    """Call `task` the way `@hydra.main` does, for every job that `words` describe.

    Args:
        words: overrides.
        task: gets the config of a job, without the hydra node.
        flags: what else there is on Hydra's command line.

    Raises:
        ConfigError: what Hydra or OmegaConf refuse.
    """
    import hydra

    from mlotool.config.composition import hydra_words

    # Completion scripts are made for the program in argv[0].
    with config.config_errors(words=words), _argv(["mlotool", *hydra_words(words), *flags]):
        folder = str(config.package_dir("conf"))
        hydra.main(config_path=folder, config_name="config", **config.VERSION_KEYWORDS)(task)()


def never(config: Any) -> float | None:
    """Stand in for the task where Hydra runs no job."""
    raise AssertionError(f"only shown, not run: {config}")


@contextmanager
def _argv(argv: list[str]) -> Iterator[None]:
    # Hydra reads sys.argv, and without the variable it prints errors and exits by itself.
    kept, sys.argv = sys.argv, argv
    variable = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = kept
        if variable is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = variable
