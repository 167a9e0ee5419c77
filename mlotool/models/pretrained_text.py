"""A pretrained text encoder from a folder on this machine, such as BERT, with a new last layer."""

from torch import Tensor, nn

from mlotool.models.pretrained_folder import check_fits, read_pretrained

# b: batch, t: tokens, w: width of the encoder, k: classes

PADDING = 0


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
        self, folder: str, num_classes: int, vocabulary_size: int, length: int, dropout: float | None = None
    ) -> None:
        super().__init__()
        # The first token goes to the new layer as it is; a pooler's parameters would never get a gradient.
        self.encoder = read_pretrained(
            folder, "AutoModel", "encoder", "bert-base-uncased", "BERT", add_pooling_layer=False
        )
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
