"""What a run changes in its process is put back; the folders that it takes."""

import logging
import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mlotool.core.errors import ConfigError
from mlotool.folders.run_folder import RunFolder, is_stamp
from mlotool.runner.process_settings import Interrupt, own_settings


def test_settings_are_put_back_and_only_irrelevant_warnings_are_silenced() -> None:
    threads, level = torch.get_num_threads(), logging.getLogger("lightning_fabric").level
    with own_settings({"num_threads": threads + 1, "deterministic": True, "tf32": True}):
        assert torch.get_num_threads() == threads + 1
        assert torch.are_deterministic_algorithms_enabled()
        warnings.warn("GPU available but not used. You can set it by", stacklevel=1)
        with pytest.raises(UserWarning, match="something else"):
            warnings.warn("something else", stacklevel=1)
    assert (torch.get_num_threads(), logging.getLogger("lightning_fabric").level) == (threads, level)
    assert not torch.are_deterministic_algorithms_enabled()


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


def test_two_runs_of_the_same_second_share_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "2026-01-31_12-00-00"
    path.mkdir()  # as Hydra does
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: RunFolder.create("mwn", path).path, range(8)))
    assert set(folders) == {path, *(path.with_name(f"{path.name}_{count}") for count in range(1, 8))}
    job = tmp_path / "2026-01-31_12-00-01" / "0"
    assert [RunFolder.create("mwn", job).path for _ in range(2)] == [job, job.with_name("0_1")]
    names = ["2026-11-21_19-02-50", "2026-11-21_19-02-50_3", "2026-11-21_19-02-50_x", "2026-11-21", "0"]
    assert [is_stamp(name) for name in names] == [True, True, False, False, False]
    RunFolder.create("mwn", tmp_path / "mine")
    with pytest.raises(ConfigError, match="mine holds a run already"):
        RunFolder.create("mwn", tmp_path / "mine")
