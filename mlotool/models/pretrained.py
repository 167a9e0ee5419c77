"""A pretrained text encoder from a folder on this machine, such as BERT, with a new last layer.

Nothing is downloaded, and no code of the folder is run.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.settings import BelowOne, Count, target
from mlotool.core.unchanged import LINEAR_HEAD
from mlotool.folders.files import at_home
from mlotool.models.decoder import losses_of_logits, token_losses

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def read_pretrained(folder: str, loader: str, kind: str, **options: Any) -> Any:
    """Return the model of a folder, in fp32 and eval mode, with attention that has second derivatives.

    Args:
        folder: with config.json and model.safetensors, as `save_pretrained` writes them.
        loader: the class of transformers that reads it, by name.
        kind: of the model, for messages: "an encoder such as BERT".
        options: of `from_pretrained`.

    Raises:
        ConfigError: transformers is not installed; the folder holds no such model.
    """
    path = at_home(folder)
    missing = [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]
    advice = "Download one yourself, and give its folder on the command line: problems.<name>.module.folder=<folder>."
    require(not missing, "folder", folder, f"{kind} as save_pretrained writes it, with {' and '.join(missing)}", advice)
    try:
        import transformers  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"folder={folder} needs transformers, which is not installed; expected it. Run pip install 'mlotool[text]'."
        ) from error
    try:
        model = getattr(transformers, loader).from_pretrained(
            str(path),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="eager",
            **options,
        )
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"folder={folder}: no model could be read ({str(error).splitlines()[0]}); expected {kind}. Give the folder "
            "of another one."
        ) from error
    # From transformers 5 on parameters are in the file's precision, but optimizers step those in fp32.
    return model.float()


def check_fits(folder: str, kind: str, name: str, size: int, limit: int) -> None:
    """Refuse data that has more of something than the model takes.

    Args:
        folder: of the model.
        kind: of the model.
        name: of the setting of the data.
        size: its value.
        limit: the most that the model takes.

    Raises:
        ConfigError: there is more.
    """
    expected = f"at most {limit}, as the {kind} in folder={folder} has"
    require(size <= limit, name, size, expected, f"Set data.{name}={limit}.")


# b: batch, t: tokens, w: width of the encoder, k: classes

PADDING = 0


@target("module")
class PretrainedText(nn.Module):
    """A Hugging Face encoder and a linear layer on its first token.

        logits = W dropout(encoder(tokens)[:, 0])

    The weights are read from `folder`; nothing is downloaded, no code and no pickle of the folder is run: it has to
    hold model.safetensors. Attention is computed without fused kernels, which have no second derivative.

    Args:
        folder: with config.json and model.safetensors, as `save_pretrained` writes them.
        num_classes: k.
        vocabulary_size: number of token ids in the data, at most what the encoder has.
        length: t, at most what the encoder has.
        dropout: before the last layer; null: the encoder's own.

    Raises:
        ConfigError: transformers is not installed; the folder holds no such encoder; the data does not fit it.

    Source: Devlin et al. 2019, BERT.
    """

    def __init__(
        self, folder: str, num_classes: Count, vocabulary_size: Count, length: Count, dropout: BelowOne | None = None
    ) -> None:
        super().__init__()
        # The first token goes to the new layer as it is; a pooler's parameters would never get a gradient.
        self.encoder = read_pretrained(folder, "AutoModel", "an encoder such as BERT", add_pooling_layer=False)
        config = self.encoder.config
        check_fits(folder, "encoder", "vocabulary_size", vocabulary_size, config.vocab_size)
        check_fits(folder, "encoder", "length", length, getattr(config, "max_position_embeddings", length))
        self.dropout = nn.Dropout(getattr(config, "hidden_dropout_prob", 0.1) if dropout is None else dropout)
        self.classifier = nn.Linear(config.hidden_size, num_classes)
        self.train()  # transformers hands its models out in eval mode

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (b, k) of token ids (b, t)."""
        return self.features_and_logits(tokens)[1]

    def features_and_logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the last layer reads (b, w), and the logits (b, k)."""
        mask = (tokens != PADDING).long()
        features = self.dropout(self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state[:, 0])
        return features, self.classifier(features)


# b: batch, t: tokens, w: width, v: vocabulary


@target("module")
class PretrainedCausalLM(nn.Module):
    """A Hugging Face language model that predicts each token from those before it.

    The weights are read from `folder`; nothing is downloaded, no code and no pickle of the folder is run: it has to
    hold model.safetensors. Attention is computed without fused kernels, so that second derivatives exist, also by
    forward mode over reverse mode.

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
        hidden: Tensor = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

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
        return LINEAR_HEAD.covers(logits, self.features(tokens) @ self.head_weight.T)
