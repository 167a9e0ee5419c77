"""What a run changes in its process is put back."""

import logging
import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from mlotool.core.errors import ConfigError
from mlotool.runner.folder import RunFolder, plain
from mlotool.runner.process_settings import (
    Interrupt,
    announcements,
    quiet_lightning,
    torch_settings,
)


def test_torch_settings_are_put_back() -> None:
    threads = torch.get_num_threads()
    with torch_settings(num_threads=threads + 1, deterministic=True, tf32=True):
        assert torch.get_num_threads() == threads + 1
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_only_irrelevant_warnings_are_silenced() -> None:
    level = logging.getLogger("pytorch_lightning").level
    with quiet_lightning():
        warnings.warn("GPU available but not used. You can set it by", stacklevel=1)
        with pytest.raises(UserWarning, match="something else"):
            warnings.warn("something else", stacklevel=1)
    assert logging.getLogger("pytorch_lightning").level == level


def test_what_is_announced_is_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("mlotool")
    # pytest listens at the root.
    monkeypatch.setattr(logger, "propagate", False)
    with announcements():
        logger.info("kept \x1b[2J")
    logger.info("not said")
    assert capsys.readouterr().err == "mlotool: kept \\x1b[2J\n"
    assert logger.level == logging.NOTSET


def test_the_second_ctrl_c_stops_at_once() -> None:
    interrupt = Interrupt()
    with interrupt.listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        # Clusters send it several times.
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert interrupt.exit_code == 130


def test_a_config_becomes_plain_with_its_interpolations_resolved() -> None:
    config = OmegaConf.create({"a": {"b": [1, "${c}"]}, "c": 2.5, "d": None})
    found = plain(config)
    assert found == {"a": {"b": [1, 2.5]}, "c": 2.5, "d": None}
    assert (type(found), type(found["a"]), type(found["a"]["b"])) == (dict, dict, list)


def test_two_runs_of_the_same_second_share_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "2026-01-31_12-00-00"
    path.mkdir()  # as Hydra does
    config = OmegaConf.create({"name": "mwn"})
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: RunFolder.create(config, path).path, range(8)))
    assert set(folders) == {path, *(path.with_name(f"{path.name}_{count}") for count in range(1, 8))}


def test_a_job_of_two_sweeps_of_the_same_second_is_kept_apart(tmp_path: Path) -> None:
    config, job = OmegaConf.create({"name": "mwn"}), tmp_path / "2026-01-31_12-00-00" / "0"
    assert [RunFolder.create(config, job).path for _ in range(2)] == [job, job.with_name("0_1")]


def test_a_folder_with_a_name_of_the_users_is_refused_when_it_is_taken(tmp_path: Path) -> None:
    config = OmegaConf.create({"name": "mwn"})
    RunFolder.create(config, tmp_path / "mine")
    with pytest.raises(ConfigError, match="mine holds a run already"):
        RunFolder.create(config, tmp_path / "mine")
