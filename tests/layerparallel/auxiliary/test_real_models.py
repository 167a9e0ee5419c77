"""Models that people have, in stages: bit by bit the same in one process, in several, and after an interruption."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.layerparallel.auxiliary.real_models import CASES, alone, main, program, trained
from tests.layerparallel.auxiliary.test_processes import computed_alone, unequal
from tests.runner.processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes have found."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks(main, 2, folder, meanwhile=lambda: None)[1]


@pytest.mark.parametrize(("model", "method"), CASES)
def test_two_processes_are_one_bit_by_bit(model: str, method: str, found: list[dict[str, Any]]) -> None:
    expected = computed_alone(lambda ranks: alone(model, method))
    for rank in found:
        assert unequal(rank[f"{model} {method}"], expected, 0.0) == []


@pytest.mark.parametrize(("model", "method"), CASES)
def test_all_stages_learn_and_a_resumed_run_is_the_same_bit_by_bit(model: str, method: str) -> None:
    made = program(model, method, processes=False)
    before = {name: each.clone() for name, each in made.problems["net"].module.named_parameters()}
    whole = trained(made, 3)
    assert [name for name, each in before.items() if torch.equal(whole["net"][name], each)] == []
    first, second = (program(model, method, processes=False) for _ in range(2))
    trained(first, 2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed = trained(second, 1)
    assert unequal(resumed["net"], whole["net"], 0.0) == []
    assert unequal(resumed["parallel"], whole["parallel"], 0.0) == []
