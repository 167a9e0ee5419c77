"""Two ranks: real processes that talk by gloo, against one rank with the joined batches."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.distributed.collectives import Ranks
from mlotool.program import Graph, Problem, Program
from mlotool.runner.distributed import agree_on_buffers
from mlotool.runner.launcher import World
from tests.runner.processes import run_ranks
from tests.runner.two_ranks import NUM_MANY, compute, main

TOLERANCE = 1e-9
ROUNDING = 1e-4
"""Of an undamped solve with a nearly singular H, which amplifies the rounding of a mean; the damped one is exact."""

ILL_CONDITIONED = ("mwn conf/normal_cg", "unequal conf/normal_cg")
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found, Found]:
    """Return what one rank computes, and what each of two does."""
    return compute_both(tmp_path_factory.mktemp("ranks"))


def compute_both(folder: Path, num_ticks: int | None = None) -> tuple[Found, Found, Found]:
    def alone() -> Found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"programs": compute(Ranks(), num_ticks)}

    found, (first, second) = run_ranks(main, 2, folder, num_ticks, meanwhile=alone)
    return found, first, second


def test_two_ranks_equal_one_rank_with_the_joined_batches(found: tuple[Found, Found, Found]) -> None:
    assert_equal_programs(found)


class WithTwice(Ranks):
    """Beside a rank that has three times this one's values."""

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [2 * each for each in tensors]


def test_the_mean_of_buffers_leaves_what_a_backward_pass_has_kept() -> None:
    """A step that is recorded before an evaluation may be differentiated after it."""
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    program = Program([Problem("net", net, lambda batch, *, model: model(batch), roles={"model": "net"})], Graph())
    loss = net(torch.randn(4, 2)).pow(3).sum()
    before = {name: each.clone() for name, each in net.named_buffers()}
    agree_on_buffers(program, WithTwice(0, 2))
    loss.backward()
    assert torch.equal(net[1].running_var, 2 * before["1.running_var"])
    assert torch.equal(net[1].num_batches_tracked, before["1.num_batches_tracked"])


@pytest.mark.slow
def test_two_ranks_equal_one_rank_after_many_ticks(tmp_path: Path) -> None:
    """All algorithms in all programs, but normal_cg, of which the damped one is followed."""
    assert_equal_programs(compute_both(tmp_path, NUM_MANY), ill_conditioned=())


def assert_equal_programs(
    found: tuple[Found, Found, Found], ill_conditioned: tuple[str, ...] = ILL_CONDITIONED
) -> None:
    alone, first, second = (each["programs"] for each in found)
    assert alone.keys() == first.keys() == second.keys()
    wrong = {}
    for case, expected in alone.items():
        if isinstance(expected, str):
            assert first[case] == expected
            continue
        assert all(torch.equal(first[case][name], second[case][name]) for name in expected), case
        error = max(_error(first[case][name], value) for name, value in expected.items())
        if not error < (ROUNDING if case in ill_conditioned else TOLERANCE):
            wrong[case] = error
    assert not wrong


def _error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


@pytest.mark.parametrize("kind", ["mwn", "unequal", "trilevel", "nested", "difference", "unrolled"])
def test_the_programs_have_something_to_get_wrong(found: tuple[Found, Found, Found], kind: str) -> None:
    cases = found[0]["programs"]
    curved, direct = (
        torch.cat([value.flatten() for name, value in cases[f"{kind} conf/{which}"].items() if "gradient." in name])
        for which in ("cg", "first_order")
    )
    assert (curved - direct).norm() > 1e4 * TOLERANCE * direct.norm()
    refused = {case.partition(" conf/")[2] for case, value in cases.items() if isinstance(value, str)}
    # A nested program takes only what can be differentiated again.
    kinds = {"bome", "darts", "evolution", "finite_difference", "nystrom", "penalty", "saba", "sama", "unrolled", ""}
    assert refused <= kinds


def test_ranks_exchange_means_values_and_flags(found: tuple[Found, Found, Found]) -> None:
    first, second = (each["exchanges"] for each in found[1:])
    for one in (first, second):
        assert one["many"] == [0.5, 2.0, 0.5]
        assert one["mixed"] == [(0.5, torch.float64), (1.0, torch.float32)]
        assert (one["first"], one["gather"], one["any"]) == (0, [0, 1], [True, False])
        # Of 1.5 x^3 at x = 2.
        assert one["derivatives"] == [12.0, 18.0, 18.0, 9.0]


def test_noise_differs_by_rank_and_buffers_are_averaged(found: tuple[Found, Found, Found]) -> None:
    first, second = (each["exchanges"] for each in found[1:])
    assert first["noise"] != second["noise"]
    means = [(a + b) / 2 for a, b in zip(first["buffers"][0][:2], second["buffers"][0][:2], strict=True)]
    assert not torch.equal(first["buffers"][0][0], second["buffers"][0][0])
    for one in (first, second):
        assert all(map(torch.equal, one["buffers"][1][:2], means))
    assert [text.partition(" ")[2].partition(" ")[0] for text in first["differences"]] == ["BatchNorm1d"]


def test_each_rank_takes_its_own_states_back(found: tuple[Found, Found, Found]) -> None:
    first, second = (each["exchanges"]["restored"] for each in found[1:])
    for one in (first, second):
        assert one["drawn"][0] == one["drawn"][1]
    assert first["drawn"] != second["drawn"]
    for key in ("steps", "means", "snapshots", "readings"):
        for own, _, taken in (first[key], second[key]):
            assert torch.equal(own, taken), key
        own, of_first, _ = second[key]
        assert not torch.equal(own, of_first), key


def test_a_step_is_skipped_by_all_ranks_or_none(found: tuple[Found, Found, Found]) -> None:
    first, second = (each["exchanges"]["scaled"] for each in found[1:])
    assert first["scales"] == second["scales"]
    # The second batch has the sample that overflows.
    assert first["scales"] == [2.0**16, 2.0**15, 2.0**15]
    for key, value in first["parameters"].items():
        assert value.isfinite().all(), key
        assert torch.equal(value, second["parameters"][key]), key


def test_ranks_that_differ_are_found(found: tuple[Found, Found, Found]) -> None:
    for each in found[1:]:
        assert "parameters of problem 'model' are no longer the same on all ranks" in each["exchanges"]["diverged"]
        assert "after tick 7" in each["exchanges"]["diverged"]
        assert "problems.model.module: the ranks have built it with different" in each["exchanges"]["start"]


def test_the_environment_says_where_a_process_stands() -> None:
    assert World.find({}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    found = World.find({**torchrun, "MASTER_ADDR": "there", "MASTER_PORT": "7"})
    assert found == World(rank=3, size=4, local_rank=1, local_size=2, address="there", port=7)
    with pytest.raises(ConfigError, match="not MASTER_ADDR, MASTER_PORT"):
        World.find(torchrun)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_JOB_ID": "40"}
    found = World.find({**slurm, "SLURM_NODELIST": "gpu[007-010],cpu1", "SLURM_TASKS_PER_NODE": "2(x3),1"})
    assert found == World(rank=5, size=7, local_rank=1, local_size=2, address="gpu007", port=15040)
    assert World.find({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


def test_devices_are_the_processes_of_the_machine() -> None:
    world = World(rank=0, size=4, local_rank=0, local_size=2, address="here", port=1)
    world.check_devices(2)
    world.check_devices("auto")
    with pytest.raises(ConfigError, match=r"runner\.devices: found 1, .* has 2 processes .* Set runner\.devices=2"):
        world.check_devices(1)
