"""A small language model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.layerparallel.stages import traced_stages
from benchmarks.layerparallel.workload import AbstractWorkload
from mlotool.models import Decoder

VOCABULARY_SIZE, NUM_HEADS = 256, 4


@dataclass(frozen=True)
class TransformerWorkload(AbstractWorkload):
    """Equal pre-norm blocks, which hand over a vector a token: what pipelines are mostly used for.

    Without dropout, and with a head of its own, since torch's pipelines do not add up the gradients of a matrix that
    the first and the last stage share.

    Args:
        num_layers: blocks.
        width: of the stream that the blocks add to.
        num_tokens: of a text.
    """

    batch_size: int = 16
    learning_rate: float = 0.01
    momentum: float = 0.9
    num_layers: int = 8
    width: int = 128
    num_tokens: int = 64

    def make_model(self) -> nn.Module:
        """Return the whole model."""
        torch.manual_seed(0)
        decoder = Decoder(
            VOCABULARY_SIZE, self.width, 4 * self.width, NUM_HEADS, num_layers=self.num_layers, tied=False
        )
        [model] = self.settled([decoder])
        return model

    def make_stages(self, num_stages: int) -> list[nn.Module]:
        """Return the model in parts."""
        return traced_stages(*self.make_cut(num_stages), next(self.batches())[0])

    def make_cut(self, num_stages: int) -> tuple[nn.Module, Sequence[str]]:
        """Return the whole model, and the blocks that begin its parts."""
        if self.num_layers % num_stages:
            raise ValueError(f"{self.num_layers} blocks cannot be cut into {num_stages} equal stages")
        share = self.num_layers // num_stages
        return self.make_model(), [f"blocks.{share * number}" for number in range(1, num_stages)]

    def make_auxnet(self, num_stages: int) -> None:
        """Take thinned copies of the stages: one block each."""

    def samples(self) -> dict[str, Tensor]:
        """Return random tokens (n, t), and those that follow them."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(VOCABULARY_SIZE, (self.num_samples, self.num_tokens + 1), generator=generator)
        return {"input": tokens[:, :-1].contiguous(), "target": tokens[:, 1:].contiguous()}
