"""Devices of workers."""

import pytest

from mlotool.core.errors import ConfigError
from mlotool.sweep.driver import visible_devices, worker_devices

FOUR = ["0", "1", "2", "3"]


@pytest.mark.parametrize(("value", "devices"), [("GPU-a, 1", ["GPU-a", "1"]), ("", []), ("-1", [])])
def test_devices_are_those_that_the_process_may_use(value: str, devices: list[str]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": value}) == devices


@pytest.mark.parametrize(
    ("devices", "num_workers", "per_job", "jobs_per_device", "expected"),
    [
        (FOUR, 2, 2, 1, [["0", "1"], ["2", "3"]]),
        (FOUR, 6, 1, 2, [["0"], ["1"], ["2"], ["3"], ["0"], ["1"]]),
        ([], 3, 1, 1, [[], [], []]),
        (["0", "1"], 3, 1, 1, r"found 3 with the devices 0, 1.*Set sweep\.workers=2, or sweep\.jobs_per_device=2"),
        (["0"], 3, 2, 1, r"Set runner\.devices=1\."),
    ],
)
def test_workers_take_devices_in_turn(
    devices: list[str], num_workers: int, per_job: int, jobs_per_device: int, expected: list[list[str]] | str
) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            worker_devices(devices, num_workers, per_job=per_job, jobs_per_device=jobs_per_device)
    else:
        assert worker_devices(devices, num_workers, per_job=per_job, jobs_per_device=jobs_per_device) == expected
