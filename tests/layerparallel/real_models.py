"""Models that people have, in stages and with multigrid: what several processes and one compute of them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from mlotool.data.splits import InMemoryTensors
from mlotool.distributed.collectives import Ranks
from mlotool.layerparallel import Auxiliary, Multigrid, StackedLayers
from mlotool.models import Decoder
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from tests.layerparallel.test_partition import Checked, Masked, block
from tests.over_ranks import over

METHODS: dict[str, dict[str, Any]] = {"penalty": {}, "auxnet": {"variables": "auxnet", "auxnet_lr": 0.01}}
OVER_RANKS = ("decoder", "encoder", "masked")


def samples(*shape: int, are_tokens: bool = False) -> InMemoryTensors:
    """Return a batch of samples of a shape, or of token ids: each step meets them again."""
    torch.manual_seed(0)
    rows = torch.randint(0, 20, (4, *shape)) if are_tokens else torch.randn(4, *shape, dtype=torch.float64)
    return InMemoryTensors({"input": rows})


def resnet(num_blocks: int) -> nn.Module:
    """Torchvision's, without its widest blocks."""
    module = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [num_blocks] * 2 + [1, 1], num_classes=4)
    module.layer3, module.layer4, module.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 4)
    return module


def resnet50() -> nn.Module:
    kind = torchvision.models.resnet.Bottleneck
    return torchvision.models.ResNet(kind, [2, 2, 5, 2], num_classes=4, width_per_group=8)


def vision_transformer(num_layers: int) -> nn.Module:
    kind = torchvision.models.VisionTransformer
    sizes = {"image_size": 16, "patch_size": 8, "hidden_dim": 16, "mlp_dim": 32, "num_classes": 5}
    return kind(num_layers=num_layers, num_heads=2, **sizes)


def decoder(num_layers: int) -> nn.Module:
    """Its head is tied to its embedding."""
    return Decoder(20, width=16, hidden=32, num_heads=2, num_layers=num_layers)


def encoder(width: int, num_layers: int) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True), num_layers)


class Conditioned(nn.Module):
    """Blocks that are given a condition, which has a gradient, beside the state."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_Modulated() for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        condition = self.condition(x.mean(1))
        for each in self.blocks:
            x = each(x, condition=condition)
        return x


class _Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + 0.3 * torch.tanh(self.linear(x) * condition[:, None])


IMAGES, TOKENS = samples(3, 16, 16), samples(6, are_tokens=True)
Model = tuple[Callable[[], nn.Module], InMemoryTensors, str | None]
STAGED: dict[str, Model] = {
    "resnet": (partial(resnet, 1), IMAGES, None),
    "vision transformer": (partial(vision_transformer, 3), IMAGES, None),
    "decoder": (partial(decoder, 4), TOKENS, None),
    "encoder": (partial(encoder, 8, 4), samples(5, 8), None),
    "checked": (Checked, samples(8), None),
    "stacked": (lambda: StackedLayers(block, 6, 0.5), samples(8), None),
}
"""To be cut into stages."""
LAYERED: dict[str, Model] = {
    "resnet": (partial(resnet, 2), IMAGES, None),
    "resnet50": (resnet50, samples(3, 32, 32), "layer3[1:]"),
    "vision transformer": (partial(vision_transformer, 5), IMAGES, None),
    "decoder": (partial(decoder, 8), TOKENS, None),
    "encoder": (partial(encoder, 16, 8), samples(5, 16), None),
    "masked": (partial(Masked, 8), TOKENS, None),
    "checked": (Checked, samples(8), None),
    "conditioned": (Conditioned, samples(5, 8), None),
}
"""To be solved by multigrid, with the name of the part."""
CASES = [
    *((model, "penalty") for model in STAGED if model != "encoder"),
    *((model, "auxnet") for model in ("encoder", "decoder", "stacked")),
]


def spread(batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
    """Return how far what the model returns is from one, which moves all parameters."""
    loss: Tensor = (model(batch["input"]) - 1.0).square().mean()
    return loss


def program(model: Model, parallel: Any) -> Program:
    """Return a program of one problem."""
    make, rows, _ = model
    torch.manual_seed(1)
    stream, optimizer = Stream(rows, 4, seed=1), partial(torch.optim.Adam, lr=0.01)
    settings: dict[str, Any] = {"parallel": parallel, "stream": stream, "optimizer": optimizer}
    return Program([Problem("net", make().double(), spread, roles={"model": "net"}, **settings)], Graph())


def staged(model: str, method: str, *, processes: bool) -> Program:
    return program(STAGED[model], Auxiliary(stages=2, beta=4.0, processes=processes, **METHODS[method]))


def layered(model: str, **settings: Any) -> Program:
    return program(LAYERED[model], Multigrid(LAYERED[model][2], coarsening=2, cycles=1, **settings))


def trained(made: Program, num_ticks: int = 2) -> dict[str, Any]:
    """Take ticks; return the parameters, the networks and variables, and the losses."""
    schedule = Schedule(made)
    losses = [schedule.tick()["net"].loss.item() for _ in range(num_ticks)]
    state = made.state_dict()["net"]
    return {"net": state["module"], "parallel": state["parallel"], "loss": losses}


def compute(ranks: Ranks, **over_ranks: bool) -> dict[str, Any]:
    """Return what models become on some ranks; stages' variables act in the parameters after the next step."""
    # Each model in one way.
    cases = [case for case in CASES if case not in (("decoder", "penalty"), ("stacked", "auxnet"))]
    found = {
        f"{model} {method}": trained(over(ranks, staged(model, method, processes=True))) for model, method in cases
    }
    stages = {name: {**each, "parallel": each["parallel"]["cut"]} for name, each in found.items()}
    layers = {model: trained(over(ranks, layered(model, **over_ranks)))["net"] for model in OVER_RANKS}
    return {"stages": stages, "layers": layers}
