import pytest

from mlotool.core.errors import ConfigError
from mlotool.sweep.devices import visible_devices, worker_devices


@pytest.mark.parametrize(
    ("value", "devices"),
    [("0,1", ["0", "1"]), ("", []), ("-1", []), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])],
)
def test_devices_are_those_that_the_process_may_use(value: str, devices: list[str]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": value}) == devices


@pytest.mark.parametrize(
    ("num_workers", "per_job", "jobs_per_device", "expected"),
    [
        (2, 1, 1, [["0"], ["1"]]),
        (4, 1, 1, [["0"], ["1"], ["2"], ["3"]]),
        (2, 2, 1, [["0", "1"], ["2", "3"]]),
        (6, 1, 2, [["0"], ["1"], ["2"], ["3"], ["0"], ["1"]]),
    ],
)
def test_workers_take_devices_in_turn(
    num_workers: int, per_job: int, jobs_per_device: int, expected: list[list[str]]
) -> None:
    devices = ["0", "1", "2", "3"]
    assert worker_devices(devices, num_workers, per_job=per_job, jobs_per_device=jobs_per_device) == expected


def test_without_devices_there_is_nothing_to_share() -> None:
    assert worker_devices([], 3, per_job=1, jobs_per_device=1) == [[], [], []]


@pytest.mark.parametrize(
    ("devices", "per_job", "advice"),
    [
        (["0", "1"], 1, r"Set sweep\.workers=2, or sweep\.jobs_per_device=2"),
        (["0", "1"], 2, r"Set sweep\.workers=1, or sweep\.jobs_per_device=3"),
        (["0"], 2, r"Set runner\.devices=1\."),
    ],
)
def test_too_few_devices_are_named(devices: list[str], per_job: int, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"found 3 with the devices {', '.join(devices)}.*{advice}"):
        worker_devices(devices, 3, per_job=per_job, jobs_per_device=1)
