import pytest
import torch
from torch import nn

from mlotool.core import BoundModule
from mlotool.losses import corrected_cross_entropy, correction_analysis, correction_loss
from mlotool.models import MLP, LabelCorrector, WeightNet


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, 3, (6,), generator=generator)
    return {
        "input": torch.randn(6, 4, generator=generator, dtype=torch.float64),
        "target": target,
        "clean_target": (target + torch.tensor([0, 0, 0, 1, 1, 0])) % 3,
    }


@pytest.fixture
def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        "model": MLP([4], 3, hidden=[5]),
        "corrector": LabelCorrector(5, 3, hidden=7),
        "weigher": WeightNet(hidden=6),
    }
    return {name: module.double() for name, module in made.items()}


def _by_hand(batch: dict[str, torch.Tensor], modules: dict[str, nn.Module]) -> tuple[torch.Tensor, ...]:
    """Labels (b, 3), losses (b,) and weights (b,), with features and losses cut off where the equation says so."""
    first, last = modules["model"].layers[1], modules["model"].layers[3]
    features = torch.relu(batch["input"] @ first.weight.T + first.bias)
    log_probability = torch.log_softmax(features @ last.weight.T + last.bias, dim=1)
    corrector, h = modules["corrector"], features.detach()
    given = torch.eye(3, dtype=torch.float64)[batch["target"]]
    hidden = torch.relu(corrector.trust_hidden(torch.cat([h, given], dim=1)))
    trust = torch.sigmoid(corrector.trust_output(hidden))
    label = trust * given + (1 - trust) * torch.softmax(h @ corrector.label.weight.T + corrector.label.bias, dim=1)
    losses = -(label * log_probability).sum(dim=1)
    return label, losses, modules["weigher"](losses.detach()[:, None]).squeeze(1)


@pytest.mark.parametrize("normalize", [True, False])
def test_value_and_gradients_by_hand(
    batch: dict[str, torch.Tensor], modules: dict[str, nn.Module], normalize: bool
) -> None:
    roles = {name: BoundModule(module) for name, module in modules.items()}
    found = corrected_cross_entropy(batch, **roles, normalize=normalize).loss
    _, losses, weight = _by_hand(batch, modules)
    expected = (weight * losses).sum() / (weight.sum() if normalize else 6)
    torch.testing.assert_close(found, expected)
    for module in modules.values():
        used = [p for name, p in module.named_parameters()]
        torch.testing.assert_close(
            torch.autograd.grad(found, used, retain_graph=True), torch.autograd.grad(expected, used, retain_graph=True)
        )


def test_upper_loss_adds_the_corrector_s_own_prediction(
    batch: dict[str, torch.Tensor], modules: dict[str, nn.Module]
) -> None:
    roles = {name: BoundModule(modules[name]) for name in ("model", "corrector")}
    output = correction_loss(batch, **roles)
    features, logits = modules["model"].features_and_logits(batch["input"])
    expected = nn.functional.cross_entropy(logits, batch["target"])
    expected = expected + nn.functional.cross_entropy(modules["corrector"].predict(features), batch["target"])
    torch.testing.assert_close(output.loss, expected)
    assert set(output.metrics) == {"accuracy", "prediction_accuracy"}


def test_analysis_counts_right_labels(batch: dict[str, torch.Tensor], modules: dict[str, nn.Module]) -> None:
    halves = [{name: values[part] for name, values in batch.items()} for part in (slice(0, 4), slice(4, 6))]
    result = correction_analysis(halves, **{name: BoundModule(module) for name, module in modules.items()})
    label, losses, weight = _by_hand(batch, modules)
    torch.testing.assert_close(result["loss"], losses.detach())
    torch.testing.assert_close(result["weight"], weight.detach())
    assert result["clean"].tolist() == [True, True, True, False, False, True]
    assert float(result["given_right"]) == pytest.approx(4 / 6)
    right = (label.argmax(dim=1) == batch["clean_target"]).double().mean()
    assert float(result["corrected_right"]) == pytest.approx(float(right))
    assert not any(values.requires_grad for values in result.values())
