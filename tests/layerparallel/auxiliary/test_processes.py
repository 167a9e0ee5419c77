"""A stage a process: real processes that talk by gloo, against all stages in one."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.distributed.collectives import Ranks
from tests.layerparallel import real_models
from tests.layerparallel.auxiliary.ranks import compute, main
from tests.runner.processes import run_ranks

TOLERANCE = 1e-9
Found = list[dict[str, Any]]


def start(folder: Path, num_ranks: int) -> Found:
    """Return what each of several processes has found."""
    return run_ranks(main, num_ranks, folder, meanwhile=lambda: None)[1]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return start(tmp_path_factory.mktemp("ranks"), 2)


@pytest.fixture(scope="module")
def alone() -> dict[bool, dict[str, Any]]:
    return {processes: computed_alone(compute, 2, processes=processes) for processes in (True, False)}


def computed_alone(run: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what one process computes with one thread, as each of several has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(Ranks(), *args, **kwargs)
    finally:
        torch.set_num_threads(threads)


def assert_equal(ours: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Compare the leaves of nested containers; with a tolerance of 0, each bit."""
    if isinstance(expected, dict):
        assert ours.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(ours[key], value, tolerance)
    elif isinstance(expected, list | tuple):
        for pair in zip(ours, expected, strict=True):
            assert_equal(*pair, tolerance)
    elif isinstance(expected, Tensor | float):
        torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)
    else:
        assert ours == expected


@pytest.mark.parametrize(("kind", "tolerance"), [("alone", 0.0), ("lower", TOLERANCE)])
def test_two_processes_are_one(kind: str, tolerance: float, found: Found, alone: dict[bool, dict[str, Any]]) -> None:
    """Parameters, running statistics, optimizer, variables, multipliers, networks, losses, violations: on each rank.

    Alone in every bit; in Meta-Weight-Net's kind of program the upper problem's data are divided.
    """
    expected = {name: each for name, each in alone[True].items() if name.startswith(kind)}
    assert len(expected) >= 3
    for rank in found:
        for name, each in expected.items():
            assert_equal(rank["stages"][name], each, tolerance)


def test_two_parts_of_the_batch_are_the_whole(found: Found, alone: dict[bool, dict[str, Any]]) -> None:
    """All stages in each process, data parallel; batches of 5 and 2 are divided unequally."""
    for rank in found:
        for name, each in alone[False].items():
            assert_equal(_settled(rank["parts"][name]), _settled(each), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_more_processes(num_ranks: int, tmp_path: Path, alone: dict[bool, dict[str, Any]]) -> None:
    """A stage each, where the derivative of a chain passes from network to network; of four, two stages of halves."""
    expected = computed_alone(compute, num_ranks, processes=True)
    for rank in start(tmp_path, num_ranks):
        for name, each in expected.items():
            for key, value in each.items():
                # A mean over three ranks is rounded.
                is_exact = name.startswith("alone") and (num_ranks == 4 or key != "gradient")
                assert_equal(rank["each"][name][key], value, 0.0 if is_exact else TOLERANCE)
        for name in (each for each in alone[False] if num_ranks == 4 and "alone" not in each):
            assert_equal(_settled(rank["stages"][name]), _settled(alone[False][name]), TOLERANCE)


def test_models_that_people_have(found: Found) -> None:
    """Stages bit by bit; layers over ranks train as in one process, and alike on both."""
    alone = computed_alone(real_models.compute)
    for rank in found:
        assert_equal(rank["models"]["stages"], alone["stages"])
        torch.testing.assert_close(rank["models"]["layers"], alone["layers"], rtol=1e-9, atol=1e-11)
    assert_equal(*(rank["models"]["layers"] for rank in found))


def test_a_run_goes_on_from_what_rank_0_has_saved(found: Found) -> None:
    for rank in found:
        assert_equal(rank["resumed"]["resumed"], rank["resumed"]["whole"])


def test_what_several_processes_cannot_do(found: Found) -> None:
    refused = [rank["refused"] for rank in found]
    assert "problems.net.gradient_clip_norm: found" in refused[0]["clip"]
    assert "stages: found 3; expected a number that divides the 2 ranks" in refused[1]["stages"]
    assert "Set runner.devices=3" in refused[0]["stages"]
    assert "beside the module's call, and not 0.0.weight" in refused[1]["beside"]


def test_a_process_that_is_gone_is_named(found: Found) -> None:
    assert "Stage 0 has lost the process of stage 1" in found[0]["refused"]["beside"]
    assert "resume=auto" in found[0]["refused"]["beside"]


def _settled(result: dict[str, Any]) -> dict[str, Any]:
    """Leave out what the parts of a batch do not share: the losses of each."""
    return {key: value for key, value in result.items() if key != "loss"}
