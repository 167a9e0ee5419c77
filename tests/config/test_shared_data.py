"""Data objects of several runs of one process, each built once."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils._pytree import tree_leaves

from mlotool.config import build, compose
from mlotool.config.instantiate import instantiate
from mlotool.config.user_data import SharedData
from mlotool.fusion.stack import StackedStream
from mlotool.runner.evaluation import Evaluator

Change = Callable[[dict[str, Any]], DictConfig]


def test_runs_whose_data_are_described_alike_share_them(changed: Change) -> None:
    shared = SharedData()
    first, same, other, limited = (
        build(changed(values), shared=shared)
        for values in (
            {"seed": 1},
            {"seed": 1, "problems.classifier.optimizer.lr": 0.01},
            {"seed": 2},
            {"seed": 1, "debug.limit_samples": 20},
        )
    )
    streams = [each.program.problems["classifier"].stream for each in (first, same, other, limited)]
    assert streams[0].dataset is streams[1].dataset
    assert streams[0] is not streams[1]
    assert streams[0].loads_like(streams[1])
    assert not streams[0].loads_like(streams[2])
    assert StackedStream(streams[:2]).shares
    assert streams[2].dataset is not streams[0].dataset
    assert len(streams[3].dataset) == 20
    assert first.data is same.data
    assert first.data.num_classes == 10


def test_shared_data_give_what_ones_own_give(changed: Change) -> None:
    shared = SharedData()
    build(changed({}), shared=shared)
    ours, own = build(changed({}), shared=shared), build(changed({}))
    for name in ours.program.problems:
        for _ in range(3):
            pair = [each.program.problems[name].stream.next() for each in (ours, own)]
            assert all(torch.equal(*each) for each in zip(*map(tree_leaves, pair), strict=True))
    module = ours.program.problems["classifier"].module
    for split in ("val", "train"):
        values = [
            Evaluator(module, each.data, ["accuracy", "cross_entropy"], 64).evaluate(split) for each in (ours, own)
        ]
        assert values[0] == values[1]


DATA = ["digits", "peaks", "synthetic_classification", "synthetic_spectra", "synthetic_text", "two_domains"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("option", DATA)
def test_building_data_draws_from_no_global_generator(option: str) -> None:
    node = OmegaConf.to_container(compose("plain", [f"data={option}"]).data, resolve=True)
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    instantiate("data", node)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_data_of_a_users_class_are_built_by_each_run() -> None:
    shared = SharedData()
    for node in ({"_target_": "mine.Data"}, {"_target_": "mlotool.data.Digits", "inside": {"_target_": "mine.Part"}}):
        assert shared.of(node, None, list) is not shared.of(node, None, list)
    data = shared.of({"_target_": "mine.Data"}, None, list)
    assert shared.evaluated(data) is data
