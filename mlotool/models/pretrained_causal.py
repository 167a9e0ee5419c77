"""A pretrained language model from a folder on this machine, such as GPT-2 or Llama."""

from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core.settings import Count, target
from mlotool.models.pretrained_text import check_fits, read_pretrained
from mlotool.models.token_losses import losses_of_logits, token_losses

# b: batch, t: tokens, w: width, v: vocabulary


@target("module")
class PretrainedCausalLM(nn.Module):
    """A Hugging Face language model that predicts each token from those before it.

    The weights are read from `folder`; nothing is downloaded, no code and no pickle of the folder is run: it has to
    hold model.safetensors. Attention is computed without fused kernels, and SiLU as x * sigmoid(x), so that second
    derivatives exist, also by forward mode over reverse mode.

    Args:
        folder: with config.json and model.safetensors, as `save_pretrained` writes them.
        vocabulary_size: number of token ids in the data, at most what the model has.
        length: t, at most what the model has.

    Raises:
        ConfigError: transformers is not installed; the folder holds no such model; the data does not fit it.

    Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners (GPT-2).
    """

    def __init__(self, folder: str, vocabulary_size: Count, length: Count) -> None:
        super().__init__()
        self.model = read_pretrained(folder, "AutoModelForCausalLM", "a language model such as GPT-2 or Llama")
        check_fits(folder, "model", "vocabulary_size", vocabulary_size, self.model.config.vocab_size)
        check_fits(folder, "model", "length", length, getattr(self.model.config, "max_position_embeddings", length))
        _replace_silu(self.model)
        self.width: int = self.model.config.hidden_size
        self._is_linear = self._has_linear_head()
        self.train()  # transformers hands its models out in eval mode

    @property
    def head_weight(self) -> Tensor:
        """The matrix (v, w) that makes logits of features."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (b, t, v) of token ids (b, t): those at place i are for the token at place i + 1."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def features(self, tokens: Tensor) -> Tensor:
        """Return what the head reads (b, t, w) of token ids (b, t)."""
        found: Tensor = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return found

    def losses(self, tokens: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
        """Return the cross-entropy (b, t), in nats, of each token's prediction.

        In a loss, `model.method("losses", tokens, targets)`, where `model` is a role.

        Args:
            tokens: ids (b, t).
            targets: ids (b, t) of the tokens that follow.
            chunk: tokens whose logits live at once; None: as many as have 2^22 logits. A model that does more than a
                product with its head (a bias, a cap on logits) takes all at once.
        """
        if not self._is_linear:
            return losses_of_logits(self(tokens), targets)
        return token_losses(self.features(tokens), self.head_weight, targets, chunk)

    @torch.no_grad()
    def _has_linear_head(self) -> bool:
        """Return whether logits are a product of the features and the head, by what the model computes."""
        tokens = torch.arange(min(2, self.model.config.vocab_size), device=self.head_weight.device)[None]
        logits = self(tokens)
        difference = logits - self.features(tokens) @ self.head_weight.T
        return bool(difference.norm() <= 1e-6 * logits.norm())


class _SiLU(nn.Module):
    """Torch's own has no forward derivative of its reverse one."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


def _replace_silu(model: Any) -> None:
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.SiLU) or type(child).__name__ == "SiLUActivation":
                setattr(module, name, _SiLU())
