"""Models that people have, in stages: what several processes and one compute of them in test_real_models.py."""

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
from mlotool.layerparallel import Auxiliary, StackedLayers
from mlotool.models import Decoder
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.runner.run_config import World, joined
from tests.layerparallel.test_partition import Checked, block
from tests.over_ranks import over

NUM_TICKS = 2
METHODS: dict[str, dict[str, Any]] = {
    "penalty": {},
    "auxnet": {"variables": "auxnet", "auxnet_lr": 0.01},
}


class Samples:
    """Eight samples of a shape, or of token ids, with their numbers."""

    def __init__(self, shape: tuple[int, ...], *, are_tokens: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        if are_tokens:
            self.input = torch.randint(0, 20, (8, *shape), generator=generator)
        else:
            self.input = torch.randn(8, *shape, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return len(self.input)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self.input[index], "index": torch.tensor(index)}


def resnet(num_blocks: int = 1) -> nn.Module:
    """Torchvision's, without its widest blocks."""
    module = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [num_blocks] * 2 + [1, 1], num_classes=4)
    module.layer3, module.layer4, module.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 4)
    return module


def vision_transformer(num_layers: int = 4) -> nn.Module:
    kind = torchvision.models.VisionTransformer
    sizes = {"image_size": 16, "patch_size": 8, "hidden_dim": 16, "mlp_dim": 32, "num_classes": 5}
    return kind(num_layers=num_layers, num_heads=2, **sizes)


def decoder(num_layers: int = 4) -> nn.Module:
    """Its head is tied to its embedding."""
    return Decoder(20, width=16, hidden=32, num_heads=2, num_layers=num_layers)


def encoder(width: int = 8, num_layers: int = 4) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True), num_layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], Samples]] = {
    "resnet": (resnet, Samples((3, 16, 16))),
    "vision transformer": (vision_transformer, Samples((3, 16, 16))),
    "decoder": (decoder, Samples((6,), are_tokens=True)),
    "encoder": (encoder, Samples((5, 8))),
    "checked": (Checked, Samples((8,))),
    "stacked": (lambda: StackedLayers(block, 6, 0.5), Samples((8,))),
}


CASES = [
    *((model, "penalty") for model in MODELS if model != "encoder"),
    *((model, "auxnet") for model in ("encoder", "decoder", "stacked")),
]


def spread(batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
    """Return how far what the model returns is from one, which moves all parameters."""
    loss: Tensor = (model(batch["input"]) - 1.0).square().mean()
    return loss


def program(model: str, method: str, *, processes: bool) -> Program:
    """Return a program of one problem in two stages."""
    make, samples = MODELS[model]
    torch.manual_seed(1)
    net = Problem(
        "net",
        make().double(),
        spread,
        roles={"model": "net"},
        parallel=Auxiliary(stages=2, beta=4.0, processes=processes, **METHODS[method]),
        stream=Stream(samples, 4, seed=1),
        optimizer=partial(torch.optim.Adam, lr=0.01),
    )
    return Program([net], Graph())


def trained(made: Program, num_ticks: int = NUM_TICKS) -> dict[str, Any]:
    """Take ticks; return the parameters, the networks and variables, and the losses."""
    schedule = Schedule(made)
    losses = [schedule.tick()["net"].loss.item() for _ in range(num_ticks)]
    state = made.state_dict()["net"]
    return {"net": state["module"], "parallel": state["parallel"], "loss": losses}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(World.find(os.environ), torch.device("cpu")) as ranks:
        found = {
            f"{model} {method}": _digest(trained(over(ranks, program(model, method, processes=True))))
            for model, method in CASES
        }
        torch.save(found, folder / f"rank_{ranks.rank}.pt")


def alone(model: str, method: str) -> dict[str, Any]:
    """Return what one process computes."""
    return _digest(trained(over(Ranks(), program(model, method, processes=True))))


def _digest(found: dict[str, Any]) -> dict[str, Any]:
    # The variables are compared where they act: in the parameters after the next step.
    return {"net": found["net"], "loss": found["loss"], "cut": found["parallel"]["cut"]}
