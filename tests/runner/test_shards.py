"""Sharded problems: two real processes that talk by gloo, against one rank with the joined batches."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import SABA, ConjugateGradient, Identity, Implicit, Unrolled
from mlotool.program import Graph, Problem, Program
from mlotool.program.shards import _blocks
from mlotool.runner.distributed import distribute
from mlotool.runner.ranks import Ranks
from tests.programs import message_of
from tests.runner.processes import run_two
from tests.runner.two_shards import PROGRAMS, Net, alone, compute, every_use, two_levels

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found, Found]:
    """Return what one rank computes, and what each of two does."""

    def meanwhile() -> Found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compute(Ranks())

    return run_two("tests.runner.two_shards", tmp_path_factory.mktemp("shards"), meanwhile=meanwhile)


@pytest.mark.parametrize("kind", ["one group", "groups"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_shards_equal_one_rank_with_the_joined_batches(
    found: tuple[Found, Found, Found], name: str, kind: str
) -> None:
    """Gradients at the start, then parameters, optimizers' states and norms after ticks, with unequal shares."""
    expected = found[0][name]
    for each in found[1:]:
        assert each[kind][name].keys() == expected.keys()
        for key, value in each[kind][name].items():
            error = (value - expected[key]).abs().max() / expected[key].abs().max().clamp_min(1e-12)
            assert error < 1e-9, (key, float(error))
