"""Tests of the package: python -m pytest mypackage."""

from pathlib import Path

import pytest
import torch

import mlotool
from mypackage.data import TwoMoons
from mypackage.losses import clean_loss, noisy_loss
from mypackage.metrics import confidence
from mypackage.models import Classifier, MistakeRates

RECIPE = Path(__file__).with_name("mypackage.yaml")


def test_the_recipe_runs(tmp_path: Path) -> None:
    """A short run of the whole recipe: `debug=fast` limits ticks and samples."""
    short = ["debug=fast", "logger=csv", "runner.progress_bar=false", "runner.accelerator=cpu"]
    config = mlotool.compose(str(RECIPE), short, trust=["mypackage"])
    result = mlotool.run(config, output_dir=tmp_path / "run")
    assert 0 <= result.metrics["val/accuracy"] <= 1
    assert 0 <= result.metrics["test/confidence"] <= 1


def test_without_mistakes_the_losses_are_equal() -> None:
    """A loss is a plain function: a test calls it with a module, or any function, for each role."""
    points, labels = TwoMoons({"train": 20}).split("train")[:]
    batch, model = {"input": points, "target": labels}, Classifier()
    noisy = noisy_loss(batch, model=model, rates=lambda: torch.zeros(2))
    assert noisy.item() == pytest.approx(clean_loss(batch, model=model).item(), rel=1e-5)


def test_recorded_labels_have_probabilities_that_add_up() -> None:
    """A label is recorded as one of the two classes, at any rates."""
    point, model, rates = torch.randn(1, 2), Classifier(), MistakeRates(initial=0.3)
    batches = [{"input": point, "target": torch.tensor([label])} for label in (0, 1)]
    losses = [noisy_loss(batch, model=model, rates=rates) for batch in batches]
    assert sum(loss.neg().exp().item() for loss in losses) == pytest.approx(1, rel=1e-5)


def test_mistakes_are_made_as_often_as_asked() -> None:
    """The labels of other splits stay right, and so do those of a class without mistakes."""
    labels = TwoMoons({"train": 2000, "meta": 100}, mistakes=(0.0, 0.4)).split("train")[:][1]
    assert (labels == 1).float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(TwoMoons({"meta": 4}, mistakes=(0.0, 0.4)).split("meta")[:][1], torch.tensor([0, 1, 0, 1]))


def test_confidence_is_a_number_for_each_sample() -> None:
    """A run takes the mean of these numbers over a whole split."""
    points, labels = TwoMoons({"val": 7}).split("val")[:]
    confidences = confidence(Classifier(), {"input": points, "target": labels})["confidence"]
    assert confidences.shape == (7,)
