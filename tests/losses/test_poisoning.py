import pytest
import torch
from torch import nn

from mlotool.core import BoundModule
from mlotool.losses import attack_analysis, attack_cross_entropy, negated_cross_entropy, poisoned_cross_entropy
from mlotool.models import BoundedPerturbation


@pytest.fixture
def batch(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**batch, "target": torch.tensor([0, 1, 1, 2, 1, 0]), "index": torch.tensor([0, 3, 1, 2, 8, 4])}


def test_only_the_first_samples_of_the_base_class_change(batch: dict[str, torch.Tensor], model: nn.Linear) -> None:
    perturbation = BoundedPerturbation([4], num_samples=5, radius=0.5, start="random").double()
    roles = {"model": BoundModule(model), "perturbation": BoundModule(perturbation)}
    output = poisoned_cross_entropy(batch, **roles, base_class=1)
    inputs = batch["input"].clone()
    for row, index in ((1, 3), (2, 1)):  # the sample at index 8 is of class 1 too, but has no perturbation
        inputs[row] += 0.5 * torch.tanh(perturbation.raw[index])
    torch.testing.assert_close(output.loss, nn.functional.cross_entropy(model(inputs), batch["target"]))
    assert float(output.metrics["poisoned"]) == pytest.approx(2 / 6)
    output.loss.backward()
    assert perturbation.raw.grad.abs().sum(dim=1).ne(0).tolist() == [False, True, False, True, False]
    # Where no class is named, those of all classes change.
    every = poisoned_cross_entropy(batch, **roles)
    inputs = batch["input"] + perturbation(batch["index"])
    torch.testing.assert_close(every.loss, nn.functional.cross_entropy(model(inputs), batch["target"]))


def test_the_attacker_s_loss_is_the_classifier_s_turned(batch: dict[str, torch.Tensor], model: nn.Linear) -> None:
    output = negated_cross_entropy(batch, model=BoundModule(model))
    torch.testing.assert_close(output.loss, -nn.functional.cross_entropy(model(batch["input"]), batch["target"]))


def test_attack_looks_at_victims_alone(batch: dict[str, torch.Tensor], model: nn.Linear) -> None:
    output = attack_cross_entropy(batch, model=BoundModule(model), victim_class=0, base_class=2)
    logits = model(batch["input"])[[0, 5]]
    torch.testing.assert_close(output.loss, -torch.log_softmax(logits, dim=1)[:, 2].mean())
    assert float(output.metrics["success"]) == pytest.approx(float((logits.argmax(dim=1) == 2).double().mean()))
    none = attack_cross_entropy(batch, model=BoundModule(model), victim_class=3, base_class=2)
    assert float(none.loss.detach()) == 0.0


def test_analysis_tells_success_from_mistakes(batch: dict[str, torch.Tensor]) -> None:
    class Always(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(torch.tensor([2, 1, 0])[: len(images)], 3).double()

    batches = [{name: values[part] for name, values in batch.items()} for part in (slice(0, 3), slice(3, 6))]
    result = attack_analysis(batches, model=BoundModule(Always()), victim_class=1, base_class=2)
    assert result["prediction"].tolist() == [2, 1, 0, 2, 1, 0]
    # Victims are the samples 1, 2 and 4, taken for 1, 0 and 1.
    assert float(result["success"]) == 0.0
    assert float(result["mistaken"]) == pytest.approx(1 / 3)
    assert int(result["num_victims"]) == 3
