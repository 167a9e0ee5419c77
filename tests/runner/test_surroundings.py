"""What a run changes in its process is put back."""

import logging
import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from mlotool.runner.folder import new_output_dir, plain
from mlotool.runner.surroundings import Interrupt, graceful_interrupt, quiet_lightning, torch_settings


def test_torch_settings_are_put_back() -> None:
    threads = torch.get_num_threads()
    with torch_settings(num_threads=threads + 1, deterministic=True):
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


def test_the_second_ctrl_c_stops_at_once() -> None:
    interrupt = Interrupt()
    with graceful_interrupt(interrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_config_becomes_plain_with_its_interpolations_resolved() -> None:
    config = OmegaConf.create({"a": {"b": [1, "${c}"]}, "c": 2.5, "d": None})
    found = plain(config)
    assert found == {"a": {"b": [1, 2.5]}, "c": 2.5, "d": None}
    assert (type(found), type(found["a"]), type(found["a"]["b"])) == (dict, dict, list)


def test_each_run_gets_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = new_output_dir("mwn")
    first.mkdir(parents=True)
    assert new_output_dir("mwn") != first
    assert first.parent == Path("outputs/mwn")
