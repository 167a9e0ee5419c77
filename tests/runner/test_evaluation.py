"""Metrics against their definitions."""

import math
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from mlotool.core.errors import ConfigError
from mlotool.data import InMemoryTensors
from mlotool.runner.evaluation import METRIC_NAMES, Batches, Evaluator, build_metric
from tests.runner.tiny import NUM_CLASSES, NUM_FEATURES, Data


class Items:
    """A data set without `__getitems__`."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> object:
        return self._inner[index]


def test_metrics_are_those_of_the_whole_split() -> None:
    data, module = Data(), nn.Linear(NUM_FEATURES, NUM_CLASSES)
    split = data.split("test")
    values = Evaluator(module, data, ["accuracy", "cross_entropy", "recall"], batch_size=7).evaluate("test")
    with torch.no_grad():
        logits = module(split.input)
    correct = logits.argmax(1) == split.target
    assert values["test/accuracy"] == pytest.approx(correct.float().mean().item())
    assert values["test/cross_entropy"] == pytest.approx(functional.cross_entropy(logits, split.target).item())
    recalls = [correct[split.target == label].float().mean().item() for label in range(NUM_CLASSES)]
    assert values["test/recall"] == pytest.approx(sum(recalls) / NUM_CLASSES)


def test_evaluation_is_in_eval_mode_and_leaves_the_mode_and_random_numbers_alone() -> None:
    module = nn.Sequential(nn.BatchNorm1d(NUM_FEATURES), nn.Dropout(0.5), nn.Linear(NUM_FEATURES, NUM_CLASSES))
    module[0].eval()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    evaluator, state = Evaluator(module, Data(), ["cross_entropy"], batch_size=8), torch.get_rng_state()
    assert evaluator.evaluate("val") == evaluator.evaluate("val")
    assert torch.equal(torch.get_rng_state(), state)
    assert [child.training for child in module] == [False, True, True]
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in module.named_buffers())


def test_a_data_set_of_single_items_gives_the_same_batches() -> None:
    split = Data().split("val")
    for one, other in zip(Batches(split, 6), Batches(Items(split), 6), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("input", "target"))


class Noisy(Items):
    """Draws from all global generators."""

    def __getitem__(self, index: int) -> object:
        sample = super().__getitem__(index)
        return {**sample, "input": sample["input"] + torch.randn(()) + numpy.random.randn() + random.gauss(0, 1)}


@pytest.mark.parametrize("batch_size", [4, 7])
def test_samples_of_an_evaluation_draw_the_same_each_time(batch_size: int) -> None:
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    found = [
        torch.cat([batch["input"] for batch in Batches(Noisy(Data().split("val")), size)]) for size in (6, batch_size)
    ]
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.cat([batch["input"] for batch in Batches(Data().split("val"), 6)]))
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


@pytest.mark.parametrize("name", METRIC_NAMES)
def test_every_metric_can_be_built(name: str) -> None:
    assert build_metric(name, 3) is not None


def test_metrics_of_a_language_model_are_means_over_its_tokens() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    tokens = torch.randint(5, (10, 4))
    data = Data()
    data.split = lambda name: InMemoryTensors({"input": tokens[:, :-1], "target": tokens[:, 1:]})  # type: ignore[method-assign]
    values = Evaluator(model, data, ["nats_per_token", "bits_per_token"], batch_size=4).evaluate("val")
    with torch.no_grad():
        probabilities = model(tokens[:, :-1]).softmax(2)
    found = [probabilities[i, j, tokens[i, j + 1]].log().item() for i in range(10) for j in range(3)]
    assert values["val/nats_per_token"] == pytest.approx(-sum(found) / 30)
    assert values["val/bits_per_token"] == pytest.approx(-sum(found) / 30 / math.log(2))


def test_a_classification_metric_needs_classes() -> None:
    with pytest.raises(ConfigError, match="needs classes"):
        build_metric("accuracy", None)


def test_logits_that_are_nan_count_as_no_class() -> None:
    module = nn.Linear(NUM_FEATURES, NUM_CLASSES)
    evaluator = Evaluator(module, Data(), ["accuracy", "f1"], batch_size=7)
    before = evaluator.evaluate("test")
    with torch.no_grad():
        module.bias[0] = math.nan
    assert [math.isnan(value) for value in evaluator.evaluate("test").values()] == [True, True]
    with torch.no_grad():
        module.bias[0] = 0.0
    assert set(before) == set(evaluator.evaluate("test"))
    assert not any(map(math.isnan, evaluator.evaluate("test").values()))


@pytest.mark.parametrize("num_classes", [1, "3"])
def test_a_number_of_classes_that_is_none_is_told(num_classes: object) -> None:
    with pytest.raises(ConfigError, match=r"data\.num_classes: found .*; expected a whole number of at least 2"):
        build_metric("f1", num_classes)  # type: ignore[arg-type]


def test_targets_have_to_fit_the_number_of_classes() -> None:
    data = Data()
    data.num_classes = 2  # type: ignore[misc]
    evaluator = Evaluator(nn.Linear(NUM_FEATURES, NUM_CLASSES), data, ["accuracy"], batch_size=16)
    with pytest.raises(ConfigError, match=r"found 2, while the split 'val' has targets from 0 to 2"):
        evaluator.rehearse("val")
