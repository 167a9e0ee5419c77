import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mlotool.core import BoundModule
from mlotool.core.errors import RunError
from mlotool.losses import (
    domain_weight_analysis,
    input_weighted_cross_entropy,
    joint_cross_entropy,
    proximal_cross_entropy,
)
from mlotool.models import Anchored


def _linear(seed: int, num_outputs: int = 3) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, num_outputs).double()


@pytest.mark.parametrize("normalize", [True, False])
def test_pretraining_by_hand(batch: dict[str, torch.Tensor], normalize: bool) -> None:
    model, weigher = Anchored(_linear(0)), _linear(1, 1)
    with torch.no_grad():
        model.module.weight.add_(1.0)
        model.module.bias.add_(1.0)
    output = input_weighted_cross_entropy(
        batch,
        model=BoundModule(model),
        weigher=BoundModule(weigher),
        normalize=normalize,
        proximity=0.5,
        free=["module.bias"],
    )
    losses = F.cross_entropy(model(batch["input"]), batch["target"], reduction="none")
    weight = weigher(batch["input"]).squeeze(1).sigmoid()
    # 12 weights have moved by 1; the bias does not count.
    expected = (weight * losses).sum() / (weight.sum() if normalize else 6) + 0.5 * 12
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.metrics["mean_weight"], weight.mean().detach())


def test_finetuning_by_hand(batch: dict[str, torch.Tensor]) -> None:
    model, center = _linear(0), _linear(1)
    output = proximal_cross_entropy(
        batch, model=BoundModule(model), center=BoundModule(center), proximity=0.1, free=["bias"]
    )
    output.loss.backward()
    distance = (model.weight - center.weight).square().sum().detach()
    torch.testing.assert_close(
        output.loss.detach(), F.cross_entropy(model(batch["input"]), batch["target"]).detach() + 0.1 * distance
    )
    torch.testing.assert_close(output.metrics["distance"], distance.sqrt())
    torch.testing.assert_close(center.weight.grad, -0.2 * (model.weight - center.weight).detach())
    assert center.bias.grad is None or not center.bias.grad.any()


def test_both_models_count(batch: dict[str, torch.Tensor]) -> None:
    model, source = _linear(0), _linear(1)
    output = joint_cross_entropy(batch, model=BoundModule(model), source=BoundModule(source), source_weight=0.25)
    losses = [F.cross_entropy(each(batch["input"]), batch["target"]) for each in (model, source)]
    torch.testing.assert_close(output.loss, losses[0] + 0.25 * losses[1])


def test_modules_that_differ_and_names_that_are_not_there_are_refused(batch: dict[str, torch.Tensor]) -> None:
    model = BoundModule(_linear(0))
    with pytest.raises(RunError, match="the same architecture"):
        proximal_cross_entropy(batch, model=model, center=BoundModule(_linear(0, 2)), proximity=0.1)
    with pytest.raises(RunError, match=r"free=\['fc.*'\].*weight, bias"):
        proximal_cross_entropy(batch, model=model, center=model, proximity=0.1, free=["fc*"])


def test_the_analysis_tells_the_domains_apart() -> None:
    weigher = nn.Linear(1, 1)
    with torch.no_grad():
        weigher.weight.fill_(1.0)
        weigher.bias.zero_()
    batches = [
        {"input": torch.tensor([[0.0], [1.0]]), "domain": torch.tensor([0, 1])},
        {"input": torch.tensor([[2.0], [-1.0]]), "domain": torch.tensor([1, 0])},
    ]
    found = domain_weight_analysis(batches, weigher=BoundModule(weigher))
    torch.testing.assert_close(found["weight"], torch.tensor([0.0, 1.0, 2.0, -1.0]).sigmoid())
    assert float(found["target_auc"]) == 1.0
    assert float(found["mean_weight_target"]) > float(found["mean_weight_source"])
    plain = domain_weight_analysis([{"input": torch.zeros(2, 1)}], weigher=BoundModule(weigher))
    assert set(plain) == {"weight", "mean_weight"}


@pytest.mark.parametrize("normalize", [True, False])
def test_without_a_weigher_all_weights_are_1(normalize: bool) -> None:
    model, batch = torch.nn.Linear(3, 4), {"input": torch.randn(5, 3), "target": torch.tensor([0, 1, 2, 3, 0])}
    output = input_weighted_cross_entropy(batch, model=BoundModule(model), normalize=normalize)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(model(batch["input"]), batch["target"]))
    assert float(output.metrics["mean_weight"]) == 1.0
