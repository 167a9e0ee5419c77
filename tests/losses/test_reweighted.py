"""Weights and labels that other problems learn."""

import pytest
import torch
from torch import nn

from mlotool.core import BoundModule
from mlotool.losses import (
    corrected_cross_entropy,
    correction_analysis,
    correction_loss,
    reweighted_cross_entropy,
    reweighted_squared_error,
    sample_weight_analysis,
    sample_weighted_cross_entropy,
    sample_weighted_squared_error,
    weight_against_loss,
)
from mlotool.losses.reweighted import wrong_label_metrics
from mlotool.models import MLP, LabelCorrector, SampleWeights, WeightNet


@pytest.fixture
def weigher() -> WeightNet:
    torch.manual_seed(1)
    return WeightNet(hidden=5).double()


def _losses_and_gradients(batch: dict[str, torch.Tensor], model: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sample's cross-entropy (b,) and its gradient with respect to the linear layer's weight (b, 3, 4)."""
    with torch.no_grad():
        probability = torch.softmax(batch["input"] @ model.weight.T + model.bias, dim=1)
    losses = -probability[torch.arange(6), batch["target"]].log()
    error = probability - torch.eye(3).double()[batch["target"]]
    return losses, error[:, :, None] * batch["input"][:, None, :]


@pytest.mark.parametrize("normalize", [True, False])
def test_value_and_gradients_by_hand(
    batch: dict[str, torch.Tensor], model: nn.Linear, weigher: WeightNet, normalize: bool
) -> None:
    output = reweighted_cross_entropy(
        batch, model=BoundModule(model), weigher=BoundModule(weigher), normalize=normalize
    )
    output.loss.backward()
    losses, gradients = _losses_and_gradients(batch, model)
    weight = weigher(losses[:, None]).squeeze(1)
    scale = weight.sum() if normalize else torch.tensor(6.0)
    torch.testing.assert_close(output.loss, (weight * losses).sum() / scale)
    # The weights are constants for the model ...
    torch.testing.assert_close(model.weight.grad, ((weight[:, None, None] * gradients).sum(0) / scale).detach())
    # ... and dC/dw_i is (l_i - C) / sum w, or l_i / b, for the weigher.
    cotangent = (losses - output.loss.detach() * normalize) / scale.detach()
    expected = torch.autograd.grad(weight, list(weigher.parameters()), cotangent)
    torch.testing.assert_close([parameter.grad for parameter in weigher.parameters()], list(expected))
    torch.testing.assert_close(output.metrics["mean_weight"], weight.mean().detach())


@pytest.mark.parametrize("normalize", [True, False])
def test_each_sample_has_its_own_weight(batch: dict[str, torch.Tensor], model: nn.Linear, normalize: bool) -> None:
    """Equal ones give the plain mean; of a weight of 1/2 the sigmoid's slope is 1/4."""
    weights = SampleWeights(10).double()
    roles = {"model": BoundModule(model), "weights": BoundModule(weights)}
    output = sample_weighted_cross_entropy(batch, **roles, normalize=normalize)
    output.loss.backward()
    losses, _ = _losses_and_gradients(batch, model)
    torch.testing.assert_close(output.loss.detach(), losses.mean() * (1 if normalize else 0.5))
    expected = torch.zeros(10, dtype=torch.float64)
    expected[batch["index"]] = 0.25 * ((losses - losses.mean()) / 3 if normalize else losses / 6)
    torch.testing.assert_close(weights.logits.grad, expected)
    del batch["clean_target"]
    found = sample_weight_analysis([batch], **roles)
    assert (set(found), found["weight"].tolist()) == ({"loss", "weight", "target", "mean_weight"}, [0.5] * 6)


@pytest.mark.parametrize("normalize", [True, False])
def test_weighted_regressions_by_hand(
    batch: dict[str, torch.Tensor], model: nn.Linear, weigher: WeightNet, normalize: bool
) -> None:
    """With weights as constants, the linear layer's gradient is `2/o sum_i w_i (W x_i + b - y_i) x_i^T / scale`."""
    batch["target"] = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    del batch["clean_target"]
    errors = (batch["input"] @ model.weight.T + model.bias - batch["target"]).detach()
    losses = errors.square().mean(dim=1)
    weights = SampleWeights(10).double()
    nn.init.normal_(weights.logits)
    of_net, of_sample = weigher(losses[:, None]).squeeze(1).detach(), weights(batch["index"]).detach()
    model_role = BoundModule(model)
    for weight, output in (
        (of_net, reweighted_squared_error(batch, model=model_role, weigher=BoundModule(weigher), normalize=normalize)),
        (
            of_sample,
            sample_weighted_squared_error(batch, model=model_role, weights=BoundModule(weights), normalize=normalize),
        ),
    ):
        scale = weight.sum() if normalize else 6
        torch.testing.assert_close(output.loss.detach(), (weight * losses).sum() / scale)
        (found,) = torch.autograd.grad(output.loss, [model.weight])
        torch.testing.assert_close(found, 2 / 3 * torch.einsum("i,io,id->od", weight, errors, batch["input"]) / scale)
    found = sample_weight_analysis([batch], model=model_role, weights=BoundModule(weights), loss="squared_error")
    torch.testing.assert_close((found["loss"], found["weight"]), (losses, of_sample))


def test_the_loss_of_an_analysis_follows_the_targets(batch: dict[str, torch.Tensor]) -> None:
    """One real number is a regression, also as (b,); a row of shares is a soft label."""
    roles = {"weights": BoundModule(SampleWeights(10).double())}
    number, flat = nn.Linear(4, 1).double(), nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double()
    target = torch.arange(6.0, dtype=torch.float64)
    for model, goal in ((number, target[:, None]), (flat, target)):
        regression = {**batch, "target": goal, "clean_target": goal.clone()}
        regression["clean_target"][0] += 1
        errors = ((model(batch["input"]) - goal) ** 2).flatten()
        found = sample_weight_analysis([regression], model=BoundModule(model), **roles)
        torch.testing.assert_close(found["loss"], errors.detach())
        assert found["clean"].tolist() == [False, *[True] * 5]
        output = sample_weighted_squared_error(regression, model=BoundModule(model), **roles)
        torch.testing.assert_close(output.loss, errors.mean())
    del batch["clean_target"]
    soft, classes = torch.full((6, 3), 1 / 3, dtype=torch.float64), nn.Linear(4, 3).double()
    found = sample_weight_analysis([{**batch, "target": soft}], model=BoundModule(classes), **roles)
    torch.testing.assert_close(found["loss"], -classes(batch["input"]).log_softmax(1).mean(1).detach())


def test_weights_that_underflow_give_no_nan(batch: dict[str, torch.Tensor], model: nn.Linear) -> None:
    weights = SampleWeights(10).double()
    nn.init.constant_(weights.logits, -1e4)
    output = sample_weighted_cross_entropy(batch, model=BoundModule(model), weights=BoundModule(weights))
    assert float(output.loss.detach()) == 0.0


def halves(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: values[part] for name, values in batch.items()} for part in (slice(0, 4), slice(4, 6))]


def test_weight_against_loss(batch: dict[str, torch.Tensor], model: nn.Linear, weigher: WeightNet) -> None:
    result = weight_against_loss(halves(batch), model=BoundModule(model), weigher=BoundModule(weigher))
    losses, _ = _losses_and_gradients(batch, model)
    weight = weigher(losses[:, None]).squeeze(1).detach()
    torch.testing.assert_close((result["loss"], result["weight"]), (losses, weight))
    assert result["target"].tolist() == batch["target"].tolist()
    assert result["clean"].tolist() == [True, True, True, False, False, True]
    torch.testing.assert_close(result["mean_weight"], weight.mean())
    torch.testing.assert_close(result["mean_weight_wrong"], weight[[3, 4]].mean())
    torch.testing.assert_close(result["mean_weight_right"], weight[[0, 1, 2, 5]].mean())
    assert not any(values.requires_grad for values in result.values())


def test_wrong_label_auc_is_the_share_of_right_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(60, generator=generator) * 10).round() / 10  # with ties
    is_wrong = torch.rand(60, generator=generator) < 0.4
    pairs = weight[is_wrong][:, None] - weight[~is_wrong][None, :]
    expected = ((pairs < 0).float() + 0.5 * (pairs == 0).float()).mean()
    assert float(wrong_label_metrics(weight, is_wrong)["wrong_label_auc"]) == pytest.approx(float(expected))


def test_tiny_weights_are_told_apart() -> None:
    weight = torch.tensor([1e-12, 2e-12, 3e-12, 4e-12])
    assert wrong_label_metrics(weight, torch.tensor([True, True, False, False]))["wrong_label_auc"] == 1.0


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
def test_corrected_labels_by_hand(
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
    result = correction_analysis(halves(batch), **{name: BoundModule(module) for name, module in modules.items()})
    label, losses, weight = _by_hand(batch, modules)
    torch.testing.assert_close(result["loss"], losses.detach())
    torch.testing.assert_close(result["weight"], weight.detach())
    assert result["clean"].tolist() == [True, True, True, False, False, True]
    assert float(result["given_right"]) == pytest.approx(4 / 6)
    right = (label.argmax(dim=1) == batch["clean_target"]).double().mean()
    assert float(result["corrected_right"]) == pytest.approx(float(right))
    assert not any(values.requires_grad for values in result.values())
