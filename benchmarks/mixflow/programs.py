"""A setting as a program of mlotool, of this version or of an earlier one."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.mixflow.setting import Setting, Way
from benchmarks.mixflow.transformer import Transformer
from mlotool import Graph, Implicit, Neumann, Problem, Program, Unrolled

LOWER, UPPER = "lower", "upper"
NUM_HESSIAN_PRODUCTS = 2
RATES = {"sgd": 0.1, "adam": 1e-3}
CHUNK = 128
"""Tokens whose logits live at once where the vocabulary is large."""
SEED = 0

Batch = Mapping[str, Tensor]


class Texts:
    """Batches of random tokens, which say as much about memory and time as real ones, in the interface of a stream."""

    def __init__(self, setting: Setting, seed: int) -> None:
        sizes, generator = setting.sizes, torch.Generator(setting.device).manual_seed(seed)
        shape = (setting.num_steps + 1, sizes.batch_size, sizes.length + 1)
        self._tokens = torch.randint(sizes.vocabulary_size, shape, generator=generator, device=setting.device)
        self._position = 0

    def next(self) -> Batch:
        """Return the next batch."""
        batch = self.peek()
        self._position += 1
        return batch

    def peek(self) -> Batch:
        """Return the batch that `next` will return."""
        return self._at(self._position)

    def last(self) -> Batch:
        """Return the batch that `next` returned last."""
        return self._at(self._position - 1)

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self._position = state["position"]

    def _at(self, position: int) -> Batch:
        tokens = self._tokens[position % len(self._tokens)]
        return {"input": tokens[:, :-1], "target": tokens[:, 1:]}


class Rates(nn.Module):
    """A learning rate for each parameter tensor."""

    def __init__(self, count: int, rate: float) -> None:
        super().__init__()
        self.logarithms = nn.Parameter(torch.full((count,), math.log(rate)))

    def forward(self) -> Tensor:
        """Return the rates."""
        return self.logarithms.exp()


class Weights(nn.Module):
    """A weight for each text of a batch."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(batch_size))

    def forward(self) -> Tensor:
        """Return the weights."""
        return self.logits.sigmoid()


def token_losses(batch: Batch, model: Any) -> Tensor:
    """Return the cross-entropy of each token."""
    losses = F.cross_entropy(model(batch["input"]).flatten(0, 1), batch["target"].flatten(), reduction="none")
    return losses.view_as(batch["target"])


def decoder_losses(batch: Batch, model: Any) -> Tensor:
    """Return the same without the logits of all tokens at once."""
    found: Tensor = model.method("losses", batch["input"], batch["target"], CHUNK)
    return found


def build(setting: Setting) -> Program:
    """Return the program of a setting; its lower problem's steps are recorded, and kept after a hypergradient."""
    torch.manual_seed(SEED)
    rate = RATES[setting.optimizer]
    of_tokens = token_losses if setting.model == "plain" else decoder_losses
    with _made_for(setting):
        module = _model(setting)
        upper, settings, roles = _upper(setting, module, rate)
    texts: list[Any] = [Texts(setting, SEED), Texts(setting, SEED + 1)]
    lower_loss = partial(_weighted_loss if setting.task == "weighting" else _loss, losses=of_tokens)
    lower = Problem(
        LOWER,
        module,
        lower_loss,
        roles={"model": LOWER, **roles},
        stream=texts[0],
        optimizer=partial({"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[setting.optimizer], lr=rate),
        hypergradient=_algorithm(setting),
        # One more than are taken, so that no tick takes the upper step.
        unroll_steps=setting.num_steps + 1,
        precision=setting.precision,
        **({"remat": ["blocks.*"]} if setting.way.remat else {}),
        **settings,
    )
    top = Problem(
        UPPER,
        upper,
        partial(_loss, losses=of_tokens),
        roles={"model": LOWER},
        stream=texts[1],
        optimizer=partial(torch.optim.SGD, lr=0.01),
        precision=setting.precision,
    )
    return Program([lower, top], Graph(upper_to_lower={UPPER: [LOWER]}, lower_to_upper={LOWER: [UPPER]}))


@contextmanager
def _made_for(setting: Setting) -> Iterator[None]:
    """Make new tensors on the setting's device, in its dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, setting.dtype))
    try:
        with torch.device(setting.device):
            yield
    finally:
        torch.set_default_dtype(before)


def _loss(batch: Batch, *, model: Any, losses: Any) -> Tensor:
    found: Tensor = losses(batch, model).mean()
    return found


def _weighted_loss(batch: Batch, *, model: Any, weigher: Any, losses: Any) -> Tensor:
    found: Tensor = (weigher() * losses(batch, model).mean(1)).mean()
    return found


def _model(setting: Setting) -> nn.Module:
    if setting.model == "plain":
        return Transformer(setting.sizes)
    from mlotool.models import Decoder  # an earlier version has none

    sizes = setting.sizes
    hidden = 4 * sizes.width if sizes.hidden is None else sizes.hidden
    return Decoder(
        sizes.vocabulary_size, sizes.width, hidden, sizes.num_heads, sizes.kv_size, num_layers=sizes.num_layers
    )


def _upper(setting: Setting, module: nn.Module, rate: float) -> tuple[nn.Module, dict[str, Any], dict[str, str]]:
    """Return the upper problem's module, with the lower problem's settings and roles that make it one."""
    if setting.task == "maml":
        return _model(setting), {"reset_to": UPPER}, {}
    if setting.task == "learning_rate":
        return Rates(len(list(module.parameters())), rate), {"optimizer_roles": {"lr": UPPER}}, {}
    return Weights(setting.sizes.batch_size), {}, {"weigher": UPPER}


def _algorithm(setting: Setting) -> Unrolled | Implicit:
    way: Way = setting.way
    forward = {"product": way.product} if way.product != "reverse" else {}
    if setting.algorithm == "implicit":
        return Implicit(Neumann(NUM_HESSIAN_PRODUCTS + 1, 0.1), way.product)
    return Unrolled(remat=not way.keeps_graphs, **forward)
