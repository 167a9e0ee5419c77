"""Losses of language models against formulas, and few-shot losses against loops."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mlotool.core import BoundModule
from mlotool.losses import (
    episode_cross_entropy,
    episode_mean_squared_error,
    episode_next_token,
    few_shot_adaptation,
    mixture_analysis,
    mixture_next_token,
    next_token,
    next_token_of_both,
    text_weight_analysis,
    weighted_next_token,
)
from mlotool.models import Decoder, MixtureWeights, SequenceWeigher

NUM_TOKENS, LENGTH, NUM_DOMAINS = 7, 5, 3


class Bigram(nn.Module):
    """Logits of the next token that depend on the last one alone."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(NUM_TOKENS, NUM_TOKENS, generator=generator, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def batch_of(num_windows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(NUM_TOKENS, (num_windows, LENGTH + 1), generator=generator)
    domain = torch.arange(num_windows) % NUM_DOMAINS
    return {"input": tokens[:, :-1], "target": tokens[:, 1:], "domain": domain}


def numpy_losses(model: Bigram, batch: dict[str, Tensor]) -> np.ndarray:
    """Each token's cross-entropy (b, t), in plain loops."""
    table, found = model.table.detach().numpy(), np.zeros(tuple(batch["input"].shape))
    for place in np.ndindex(*found.shape):
        row = table[batch["input"][place]]
        found[place] = np.log(np.exp(row).sum()) - row[batch["target"][place]]
    return found


def test_the_mean_over_all_tokens() -> None:
    model, batch = Bigram(), batch_of(6)
    output = next_token(batch, model=BoundModule(model))
    expected = numpy_losses(model, batch).mean()
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    assert output.metrics["bits_per_token"].item() == pytest.approx(expected / math.log(2), rel=1e-12)


def test_the_bigram_that_counts_is_the_best_one() -> None:
    """The loss of a table of counts is the conditional entropy of the text, and no direction lowers it."""
    batch = batch_of(200)
    counts = torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=torch.float64)
    counts.index_put_((batch["input"].flatten(), batch["target"].flatten()), torch.tensor(1.0).double(), True)
    model = Bigram()
    model.table.data = (counts / counts.sum(1, keepdim=True)).log()
    joint = (counts / counts.sum()).numpy()
    entropy = -(joint * np.log(joint / joint.sum(1, keepdims=True))).sum()
    loss = next_token(batch, model=BoundModule(model)).loss
    assert loss.item() == pytest.approx(entropy, rel=1e-12)
    [slope] = torch.autograd.grad(loss, [model.table])
    assert slope.abs().max() < 1e-12


@pytest.mark.parametrize("loss", [next_token, next_token_of_both, weighted_next_token, mixture_next_token])
def test_logits_in_chunks_are_the_same(loss: Callable) -> None:
    torch.manual_seed(0)
    model = Decoder(NUM_TOKENS, width=8, hidden=8, num_heads=2, num_layers=1).double()
    roles = {"model": BoundModule(model)}
    if loss in (weighted_next_token, next_token_of_both):
        weigher = SequenceWeigher(Decoder(NUM_TOKENS, width=8, hidden=8, num_heads=2, num_layers=1)).double()
        nn.init.normal_(weigher.output.weight)
        roles["weigher"] = BoundModule(weigher)
    if loss is mixture_next_token:
        roles["mixture"] = BoundModule(MixtureWeights(NUM_DOMAINS).double())
    values = [loss(batch_of(6), **roles, chunk=chunk).loss for chunk in (None, 3)]
    assert torch.allclose(values[0], values[1], rtol=1e-12)
    slopes = [torch.autograd.grad(value, list(model.parameters())) for value in values]
    assert all(torch.allclose(one, other, rtol=1e-9) for one, other in zip(*slopes, strict=True))


def test_a_weigher_is_taught_the_language_of_the_target() -> None:
    """The second term is the loss of its decoder as a language model, and reaches the decoder alone."""
    torch.manual_seed(0)
    model, batch = Bigram(), batch_of(6)
    weigher = SequenceWeigher(Decoder(NUM_TOKENS, width=8, hidden=8, num_heads=2, num_layers=1)).double()
    output = next_token_of_both(batch, model=BoundModule(model), weigher=BoundModule(weigher), scale=0.2)
    own = next_token(batch, model=BoundModule(weigher.decoder))
    expected = numpy_losses(model, batch).mean() + 0.2 * own.loss.item()
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    assert output.metrics["bits_per_token"].item() == pytest.approx(numpy_losses(model, batch).mean() / math.log(2))
    assert output.metrics["weigher_bits_per_token"].item() == pytest.approx(own.loss.item() / math.log(2))
    output.loss.backward()
    assert weigher.output.weight.grad is None
    assert all(bool(parameter.grad.any()) for parameter in weigher.decoder.parameters())


class Weights(nn.Module):
    """A given weight for each sequence, or each token, whatever the text."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[: len(tokens)]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_of_sequences_and_of_tokens(per_token: bool, normalize: bool) -> None:
    model, batch = Bigram(), batch_of(6)
    weight = torch.rand(6, LENGTH, dtype=torch.float64) if per_token else torch.rand(6, dtype=torch.float64)
    output = weighted_next_token(
        batch, model=BoundModule(model), weigher=BoundModule(Weights(weight)), normalize=normalize
    )
    of_token = weight.numpy() if per_token else np.repeat(weight.numpy()[:, None], LENGTH, axis=1)
    losses = numpy_losses(model, batch)
    expected = (of_token * losses).sum() / (of_token.sum() if normalize else losses.size)
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    assert output.metrics["mean_weight"].item() == pytest.approx(of_token.mean())
    assert output.metrics["bits_per_token"].item() == pytest.approx(losses.mean() / math.log(2))


@pytest.mark.parametrize("normalize", [False, True])
def test_a_mixture_is_the_loss_under_its_shares(normalize: bool) -> None:
    """Of batches that hold all domains alike, it is exactly the sum of the domains' losses by their shares."""
    model, batch, mixture = Bigram(), batch_of(4 * NUM_DOMAINS), MixtureWeights(NUM_DOMAINS).double()
    mixture.logits.data = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    output = mixture_next_token(batch, model=BoundModule(model), mixture=BoundModule(mixture), normalize=normalize)
    share = np.exp([0.3, -1.0, 2.0]) / np.exp([0.3, -1.0, 2.0]).sum()
    losses, domain = numpy_losses(model, batch), batch["domain"].numpy()
    expected = sum(share[number] * losses[domain == number].mean() for number in range(NUM_DOMAINS))
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)


def test_the_parts_of_a_task() -> None:
    model = Bigram()
    episode = {"support": batch_of(2, seed=1), "query": batch_of(3, seed=2)}
    for part in ("support", "query"):
        output = episode_next_token(episode, model=BoundModule(model), part=part)  # type: ignore[arg-type]
        expected = numpy_losses(model, episode[part]).mean()
        assert output.loss.item() == pytest.approx(expected, rel=1e-12)
        assert output.metrics["bits_per_token"].item() == pytest.approx(expected / math.log(2))
    start = BoundModule(Bigram(seed=1))
    far = episode_next_token(episode, model=BoundModule(model), start=start, proximity=0.3)
    distance = (model.table - Bigram(seed=1).table).square().sum()
    assert torch.allclose(far.loss - 0.15 * distance, episode_next_token(episode, model=BoundModule(model)).loss)


def test_what_a_mixture_has_found() -> None:
    mixture = MixtureWeights(3)
    mixture.logits.data = torch.tensor([0.5, 0.25, 0.25]).log()
    batches = [{"domain": torch.tensor([0, 0, 1])}, {"domain": torch.tensor([1, 0])}]
    found = mixture_analysis(batches, mixture=BoundModule(mixture))
    assert found["share"].tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert found["share_of_split"].tolist() == pytest.approx([0.6, 0.4, 0.0])
    assert found["share_1"].item() == pytest.approx(0.25)
    assert found["perplexity"].item() == pytest.approx(2**1.5)


def test_what_a_weigher_has_found() -> None:
    weight = torch.tensor([0.1, 0.2, 0.3, 0.6])
    batches = [{"input": torch.zeros(4, 2), "domain": torch.tensor([0, 2, 2, 0])}]
    found = text_weight_analysis(batches, weigher=BoundModule(Weights(weight)))
    assert found["weight"].tolist() == pytest.approx(weight.tolist())
    means = {name: value.item() for name, value in found.items() if value.dim() == 0}
    assert means == pytest.approx({"mean_weight": 0.3, "mean_weight_0": 0.35, "mean_weight_2": 0.25})
    by_token = torch.stack([weight, 3 * weight], dim=1)
    found = text_weight_analysis(batches, weigher=BoundModule(Weights(by_token)))
    assert found["weight"].tolist() == pytest.approx((2 * weight).tolist())


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


Tasks = Callable[[int], dict[str, dict[str, Tensor]]]
ADAPTED: dict[str, tuple[Callable[[], nn.Module], Tasks, Callable[[Tensor, Tensor], Tensor]]] = {
    "next_token": (
        Bigram,
        lambda seed: {"support": batch_of(2, seed=seed), "query": batch_of(3, seed=seed + 10)},
        lambda logits, target: nn.functional.cross_entropy(logits.transpose(1, 2), target),
    ),
    "mean_squared_error": (lambda: nn.Linear(2, 1).double(), episode, nn.functional.mse_loss),
}


@pytest.mark.parametrize("proximity", [0.0, 0.4])
@pytest.mark.parametrize("kind", ADAPTED)
def test_adaptation_equals_torch_optim(kind: Any, proximity: float) -> None:
    make, task_of, loss_of = ADAPTED[kind]
    model, tasks = make(), [task_of(seed) for seed in range(3)]
    batch = {
        part: {key: torch.stack([task[part][key] for task in tasks]) for key in ("input", "target")}
        for part in ("support", "query")
    }
    found = few_shot_adaptation([batch], model=BoundModule(model), kind=kind, num_steps=2, lr=0.1, proximity=proximity)
    curves = []
    for task in tasks:
        copied, curve = copy.deepcopy(model), []
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        for step in range(3):
            curve.append(loss_of(copied(task["query"]["input"]), task["query"]["target"]).item())
            if step < 2:
                optimizer.zero_grad()
                loss = loss_of(copied(task["support"]["input"]), task["support"]["target"])
                pairs = zip(copied.parameters(), model.parameters(), strict=True)
                (loss + 0.5 * proximity * sum(((a - b.detach()) ** 2).sum() for a, b in pairs)).backward()
                optimizer.step()
        curves.append(curve)
    expected = torch.tensor(curves).double()
    assert torch.allclose(found["query"], expected.mean(0))
    assert torch.allclose(found["after"], expected[:, -1].mean())
    assert torch.allclose(found["standard_error"], expected[:, -1].std() / 3**0.5)
