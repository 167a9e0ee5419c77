import pytest
import torch
from torch import nn

from mlotool.core import BoundModule, LossOutput
from mlotool.core.errors import RunError
from mlotool.losses import cross_entropy, mean_squared_error


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input": torch.randn(6, 4, generator=generator, dtype=torch.float64),
        "target": torch.randint(0, 3, (6,), generator=generator),
    }


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_is_the_formula(batch: dict[str, torch.Tensor], label_smoothing: float) -> None:
    model = nn.Linear(4, 3).double()
    output = cross_entropy(batch, model=BoundModule(model), label_smoothing=label_smoothing)
    logits = batch["input"] @ model.weight.T + model.bias
    log_probability = logits - logits.exp().sum(dim=1, keepdim=True).log()
    share = (1 - label_smoothing) * torch.eye(3).double()[batch["target"]] + label_smoothing / 3
    torch.testing.assert_close(output.loss, -(share * log_probability).sum(dim=1).mean())
    num_right = sum(int(row.argmax()) == int(label) for row, label in zip(logits, batch["target"], strict=True))
    assert float(output.metrics["accuracy"]) == pytest.approx(num_right / 6)
    assert not output.metrics["accuracy"].requires_grad


def test_mean_squared_error_is_the_formula(batch: dict[str, torch.Tensor]) -> None:
    model = nn.Linear(4, 1).double()
    target = torch.ones(6, 1, dtype=torch.float64)
    loss = mean_squared_error({"input": batch["input"], "target": target}, model=BoundModule(model))
    expected = sum((float(model(x).detach()) - 1) ** 2 for x in batch["input"]) / 6
    assert float(loss.detach()) == pytest.approx(expected)


def test_mean_squared_error_refuses_to_broadcast(batch: dict[str, torch.Tensor]) -> None:
    with pytest.raises(RunError, match=r"output has shape \(6, 1\), the target \(6,\); expected the same shape"):
        mean_squared_error(batch, model=BoundModule(nn.Linear(4, 1).double()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own, in its forward mode
@pytest.mark.parametrize("loss", [cross_entropy, mean_squared_error])
def test_forward_over_reverse_gives_the_same_hessian_vector_product(loss: object) -> None:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    vector = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in parameters.items()}
    inputs = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    batch = {"input": inputs, "target": inputs if loss is mean_squared_error else torch.arange(5) % 2}

    def value(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return LossOutput.of(loss(batch, model=BoundModule(model, given))).loss  # type: ignore[operator]

    _, forward = torch.func.jvp(torch.func.grad(value), (parameters,), (vector,))
    leaves = {name: parameter.clone().requires_grad_() for name, parameter in parameters.items()}
    gradient = torch.autograd.grad(value(leaves), list(leaves.values()), create_graph=True)
    product = sum((g * v).sum() for g, v in zip(gradient, vector.values(), strict=True))
    reverse = torch.autograd.grad(product, list(leaves.values()))
    torch.testing.assert_close(list(forward.values()), list(reverse))
