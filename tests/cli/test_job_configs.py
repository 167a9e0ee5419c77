"""Jobs of one process have the configs and origins that each has in a process of its own."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mlotool.cli import job_configs
from mlotool.cli.job_configs import JobConfigs
from mlotool.cli.job_words import own_words
from mlotool.core.errors import ConfigError
from mlotool.sweep.job_folder import JobSpec
from tests.config.test_variation import described

RATE = "problems.classifier.optimizer.lr"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


def specs(*jobs: tuple[str, ...]) -> list[JobSpec]:
    return [JobSpec("mlotool run -m", ("+recipe=plain", "hydra.sweep.dir=sweep", *words), None, ()) for words in jobs]


COMPOSED = job_configs._composed


def calls(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Return what Hydra is asked for from now on."""
    asked: list[Sequence[str]] = []

    def composed(spec: JobSpec, words: Sequence[str], run_dir: str) -> Any:
        asked.append(words)
        return COMPOSED(spec, words, run_dir)

    monkeypatch.setattr(job_configs, "_composed", composed)
    return asked


JOBS = {
    "values": ([("seed=0", f"{RATE}=0.1"), ("seed=1", f"{RATE}=0.1"), ("seed=1", f"{RATE}=1e-3")], 1),
    "options between": ([("seed=0", "data=digits", "data.seed=1"), ("seed=1", "data=digits_noisy", "data.seed=2")], 2),
    "a mapping": ([("seed=0", "evaluate={splits: {val: 3}}"), ("seed=1", "evaluate={splits: {val: 4}}")], 2),
    "nothing": ([("seed=3",)], 1),
    "references": ([("seed=0", "data.seed=${seed}"), ("seed=1", "data.seed=${seed}")], 1),
    "Hydra's settings": (
        [("seed=0", "logger.project=${hydra:job.name}"), ("seed=1", "logger.project=${hydra:job.name}")],
        2,
    ),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_they_are_those_of_a_job_alone(name: str, is_resumed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (jobs, num_calls), folder = JOBS[name], Path("sweep/0")
    found, configs, asked = specs(*jobs), JobConfigs(specs(*jobs)), calls(monkeypatch)
    for place in configs.in_order(found):
        config, origin = configs.compose(found[place], folder, is_resumed=is_resumed)
        *resume, run_dir = own_words(folder, is_resumed=is_resumed)
        expected, its_origin = COMPOSED(found[place], [*found[place].words, *resume], run_dir)
        assert described(config) == described(expected)
        assert OmegaConf.to_container(config, resolve=True) == OmegaConf.to_container(expected, resolve=True)
        assert origin == its_origin
        assert (config.resume is not None) == is_resumed
    assert len(asked) == num_calls


def test_what_hydra_refuses_is_said_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found = specs(("seed=0",), ("seed=x",), ("seed=2",))
    configs, asked = JobConfigs(found), calls(monkeypatch)
    assert configs.compose(found[0], Path("sweep/0"), is_resumed=False)[0].seed == 0
    with pytest.raises(ConfigError, match="seed: found 'x'; expected a whole number"):
        configs.compose(found[1], Path("sweep/1"), is_resumed=False)
    assert configs.compose(found[2], Path("sweep/2"), is_resumed=False)[0].seed == 2
    assert len(asked) == 2
