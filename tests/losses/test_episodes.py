from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mlotool.core import BoundModule
from mlotool.losses import episode_cross_entropy, episode_mean_squared_error, few_shot_adaptation

draw = partial(torch.randn, dtype=torch.float64)


def episode(seed: int = 0) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(seed)
    return {part: {"input": draw(5, 2), "target": draw(5, 1)} for part in ("support", "query")}


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(2, 1).double()


@pytest.mark.parametrize("part", ["support", "query"])
def test_squared_error_of_a_part(model: nn.Linear, part: str) -> None:
    batch = episode()
    output = episode_mean_squared_error(batch, model=BoundModule(model), part=part)
    expected = ((model(batch[part]["input"]) - batch[part]["target"]) ** 2).mean()
    assert torch.allclose(output.loss, expected)
    assert torch.allclose(output.metrics["error"], expected)


def test_the_distance_to_the_start(model: nn.Linear) -> None:
    start = {name: tensor + 2 for name, tensor in model.named_parameters()}
    roles = {"model": BoundModule(model), "start": BoundModule(model, start)}
    near = episode_mean_squared_error(episode(), **roles)
    far = episode_mean_squared_error(episode(), **roles, proximity=0.3)
    assert torch.allclose(far.loss - near.loss, torch.tensor(0.5 * 0.3 * 3 * 4.0).double())
    assert torch.equal(far.metrics["error"], near.metrics["error"])


def test_cross_entropy_of_a_part() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 3).double()
    batch = {"support": {"input": draw(4, 2), "target": torch.tensor([0, 2, 1, 1])}}
    output = episode_cross_entropy(batch, model=BoundModule(model))
    log_probabilities = torch.log_softmax(model(batch["support"]["input"]), dim=1)
    assert torch.allclose(output.loss, -log_probabilities[range(4), batch["support"]["target"]].mean())
    assert 0 <= float(output.metrics["accuracy"]) <= 1


@pytest.mark.parametrize("proximity", [0.0, 0.4])
def test_adaptation_equals_torch_optim(model: nn.Linear, proximity: float) -> None:
    tasks = [episode(seed) for seed in range(3)]
    batch = {
        part: {key: torch.stack([task[part][key] for task in tasks]) for key in ("input", "target")}
        for part in ("support", "query")
    }
    found = few_shot_adaptation(
        [batch], model=BoundModule(model), kind="mean_squared_error", num_steps=2, lr=0.1, proximity=proximity
    )
    curves = []
    for task in tasks:
        copy = nn.Linear(2, 1).double()
        copy.load_state_dict(model.state_dict())
        optimizer, curve = torch.optim.SGD(copy.parameters(), lr=0.1), []
        for step in range(3):
            query = task["query"]
            curve.append(((copy(query["input"]) - query["target"]) ** 2).mean().item())
            if step < 2:
                optimizer.zero_grad()
                support = task["support"]
                loss = ((copy(support["input"]) - support["target"]) ** 2).mean()
                pairs = zip(copy.parameters(), model.parameters(), strict=True)
                (loss + 0.5 * proximity * sum(((a - b.detach()) ** 2).sum() for a, b in pairs)).backward()
                optimizer.step()
        curves.append(curve)
    expected = torch.tensor(curves).double()
    assert torch.allclose(found["query"], expected.mean(0))
    assert torch.allclose(found["after"], expected[:, -1].mean())
    assert torch.allclose(found["standard_error"], expected[:, -1].std() / 3**0.5)
