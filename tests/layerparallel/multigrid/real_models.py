"""Models that people have, with multigrid: what several processes and one compute of them in test_in_place.py."""

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from mlotool.distributed.collectives import Ranks
from mlotool.layerparallel import Multigrid
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.runner.run_config import World, joined
from tests.layerparallel.auxiliary.real_models import Samples, decoder, encoder, resnet, spread, vision_transformer
from tests.layerparallel.test_partition import Checked
from tests.over_ranks import over

OVER_RANKS = ("decoder", "encoder", "masked")


def resnet50() -> nn.Module:
    return torchvision.models.ResNet(
        torchvision.models.resnet.Bottleneck, [2, 2, 5, 2], num_classes=4, width_per_group=8
    )


class Masked(nn.Module):
    """Torch's encoder with a causal mask, as language models are built of it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=8, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.encoder(x, mask=mask, is_causal=True)


class Conditioned(nn.Module):
    """Blocks that are given a condition, which has a gradient, beside the state."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_Modulated() for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        condition = self.condition(x.mean(1))
        for block in self.blocks:
            x = block(x, condition=condition)
        return x


class _Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + 0.3 * torch.tanh(self.linear(x) * condition[:, None])


MODELS: dict[str, tuple[Callable[[], nn.Module], Samples, str | None]] = {
    "resnet": (partial(resnet, 3), Samples((3, 16, 16)), None),
    "resnet50": (resnet50, Samples((3, 64, 64)), "layer3[1:]"),
    "vision transformer": (partial(vision_transformer, 8), Samples((3, 16, 16)), None),
    "decoder": (partial(decoder, 8), Samples((6,), are_tokens=True), None),
    "encoder": (partial(encoder, 16, 8), Samples((5, 16)), None),
    "masked": (Masked, Samples((5, 16)), None),
    "checked": (Checked, Samples((8,)), None),
    "conditioned": (Conditioned, Samples((5, 8)), None),
}


def gradients(batch: Mapping[str, Tensor], model: Any, module: nn.Module) -> dict[str, Tensor]:
    """Return those of a loss."""
    parameters = dict(module.named_parameters())
    slopes = torch.autograd.grad(spread(batch, model=model), list(parameters.values()))
    return dict(zip(parameters, slopes, strict=True))


def program(model: str, **settings: Any) -> Program:
    """Return a program of one problem."""
    make, samples, part = MODELS[model]
    torch.manual_seed(1)
    net = Problem(
        "net",
        make().double(),
        spread,
        roles={"model": "net"},
        parallel=Multigrid(part, **{"coarsening": 2, "cycles": 1, **settings}),
        stream=Stream(samples, 4, seed=1),
        optimizer=partial(torch.optim.Adam, lr=0.01),
    )
    return Program([net], Graph())


def trained(made: Program, num_ticks: int = 2) -> dict[str, Any]:
    """Take ticks; return the parameters and the losses."""
    schedule = Schedule(made)
    losses = [schedule.tick()["net"].loss.item() for _ in range(num_ticks)]
    return {"net": made.state_dict()["net"]["module"], "loss": losses}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(World.find(os.environ), torch.device("cpu")) as ranks:
        found = {model: trained(over(ranks, program(model, over_ranks=True))) for model in OVER_RANKS}
        torch.save(found, folder / f"rank_{ranks.rank}.pt")


def alone() -> dict[str, Any]:
    """Return what one process computes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {model: trained(over(Ranks(), program(model))) for model in OVER_RANKS}
