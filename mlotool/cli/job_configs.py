"""The configs of several jobs of a sweep: what they share is composed once."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlotool import config as configuration
from mlotool.cli.hydra_app import call_hydra, open_sources
from mlotool.cli.job import recipe_path
from mlotool.cli.job_words import own_words, request_of
from mlotool.config.booleans import check_overrides
from mlotool.config.variation import differing_values, is_of_hydra, varied
from mlotool.sweep.job_folder import JobSpec

Composed = tuple[Any, configuration.Origin]
Words = tuple[str, ...]

_OF_HYDRA = "${hydra:"
"""Begins a reference to a job's own settings of Hydra, which are known while Hydra calls us, and not afterwards."""


class JobConfigs:
    """Composes the configs of jobs as Hydra composes that of a job alone.

    Args:
        specs: of the jobs.
    """

    def __init__(self, specs: Sequence[JobSpec]) -> None:
        jobs = [spec.words for spec in specs]
        refers = any(_OF_HYDRA in word for words in jobs for word in words)
        self._own = [] if refers else differing_values(jobs)
        self._shared: tuple[Words, Composed] | None = None

    def in_order(self, specs: Sequence[JobSpec]) -> list[int]:
        """Return the places of jobs in the order in which to compose them: those that share the most together."""
        alike: dict[Words, list[int]] = {}
        for place, spec in enumerate(specs):
            alike.setdefault(self._split(spec.words)[0], []).append(place)
        return [place for places in alike.values() for place in places]

    def compose(self, spec: JobSpec, folder: Path, *, is_resumed: bool) -> Composed:
        """Return the config of a job, and where it came from.

        Args:
            spec: what the job is to run.
            folder: the job's.
            is_resumed: whether it goes on with the run in its folder.

        Raises:
            ConfigError: it cannot be composed.
        """
        check_overrides(spec.words)
        *resume, run_dir = own_words(folder, is_resumed=is_resumed)
        shared_words, own = self._split(spec.words)
        if own:
            shared, origin = self._composed_once(spec, shared_words, run_dir)
            config = varied(shared, [*own, *resume])
            if config is not None:
                return config, replace(origin, overrides=(*self._lines(spec.words, origin.overrides), *resume))
        return _composed(spec, [*spec.words, *resume], run_dir)

    def _lines(self, words: Words, shared: Words) -> list[str]:
        """Return a job's overrides as Hydra lists them: those of its own settings are not among them."""
        lines = list(shared)
        for place in self._own:
            lines.insert(sum(not is_of_hydra(word) for word in words[:place]), words[place])
        return lines

    def _split(self, words: Words) -> tuple[Words, Words]:
        shared = tuple(word for place, word in enumerate(words) if place not in self._own)
        return shared, tuple(words[place] for place in self._own)

    def _composed_once(self, spec: JobSpec, words: Words, run_dir: str) -> Composed:
        if self._shared is None or self._shared[0] != words:
            self._shared = words, _composed(spec, words, run_dir)
        return self._shared[1]


def _composed(spec: JobSpec, words: Sequence[str], run_dir: str) -> Composed:
    request = request_of(spec)
    open_sources(request, spec.trusted)
    found: list[Composed] = []

    def take(config: Any) -> None:
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        hydra = HydraConfig.get()
        # Not as they are read: one with a reference in it would be resolved, or fail here.
        lines: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        if any(_OF_HYDRA in line for line in lines):
            OmegaConf.resolve(config)
        recipe = recipe_path(hydra.runtime.choices, request.file)
        found.append((config, configuration.Origin(spec.command, tuple(lines), recipe)))

    call_hydra([*words, run_dir], take)
    [result] = found
    return result
