"""Models of Hugging Face: from a folder, from its Hub where that is allowed, or made of a config; with LoRA adapters.

Only tensors (safetensors) are read; no code and no pickle is run.
"""

import copy
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

import torch
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.settings import BelowOne, Count, Positive, target
from mlotool.core.unchanged import LINEAR_HEAD
from mlotool.folders import hub
from mlotool.folders.files import at_home, writing
from mlotool.models.decoder import losses_of_logits, token_losses


class LoRA(TypedDict, total=False):
    """Settings of peft.LoraConfig: what is trained are products of rank `r` beside the frozen matrices of a model."""

    r: Required[Count]
    lora_alpha: Positive
    lora_dropout: BelowOne
    target_modules: Sequence[str] | str | None
    modules_to_save: Sequence[str] | None
    bias: Literal["none", "all", "lora_only"]
    use_rslora: bool


def read_pretrained(pretrained: str, loader: str, kind: str, **options: Any) -> Any:
    """Return a model in fp32 and eval mode, with attention that has second derivatives.

    Args:
        pretrained: a folder with config.json and safetensors, as `save_pretrained` writes them, or a name on the Hub.
        loader: the class of transformers that reads it, by name.
        kind: of the model, for messages: "an encoder such as BERT".
        options: of `from_pretrained`.

    Raises:
        ConfigError: transformers is not installed; there is no such model; the Hub was not allowed.
    """
    path = hub.folder_of("pretrained", pretrained)
    weights = hub.INDEX if (path / hub.INDEX).is_file() else hub.WEIGHTS
    missing = [name for name in (hub.CONFIG, weights) if not (path / name).is_file()]
    advice = "Give the folder of one on the command line: problems.<name>.module.pretrained=<folder>."
    wanted = f"{kind} as save_pretrained writes it, with {' and '.join(missing)}"
    require(not missing, "pretrained", pretrained, wanted, advice)
    try:
        # From transformers 5 on parameters are in the file's precision, but optimizers step those in fp32.
        model = _loader(f"pretrained={pretrained}", loader).from_pretrained(
            str(path), local_files_only=True, use_safetensors=True, **_READING, **options
        )
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"pretrained={pretrained}: no model could be read ({_first_line(error)}); expected {kind}. Give the folder "
            "of another one."
        ) from error
    return model.float()


# Fused attention has no second derivative, and an implementation by name could be fetched from the Hub.
_READING = {"trust_remote_code": False, "attn_implementation": "eager"}


def made_of_config(config: Mapping[str, Any], loader: str, sizes: Mapping[str, Any]) -> Any:
    """Return a model with random weights.

    Args:
        config: `model_type`, as in config.json, and settings of its config class.
        loader: the class of transformers that makes it, by name.
        sizes: settings that `config` need not have.

    Raises:
        ConfigError: transformers is not installed, or has no such model or setting.
    """
    auto, made = _loader("config", "AutoConfig"), _loader("config", loader)
    model_type = config.get("model_type")
    try:
        plain = auto.for_model(model_type)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"config.model_type: found {model_type!r}; expected a model of transformers, such as gpt2, llama or bert. "
            "Correct config.model_type."
        ) from error
    known = {name for name in (*plain.to_dict(), *plain.attribute_map) if not name.startswith("_")} - {"auto_map"}
    for name in config:
        advice = f"{did_you_mean(name, sorted(known))} Correct config.".lstrip()
        require(name in known, "config", name, f"a setting of {type(plain).__name__}", advice)
    try:
        # GPT-2 has names of its own for some settings.
        others = {name: value for name, value in sizes.items() if plain.attribute_map.get(name) not in config}
        return made.from_config(auto.for_model(**{**others, **config}), **_READING).float()
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"config={dict(config)}: no model could be made ({_first_line(error)}); expected settings of "
            f"{type(plain).__name__} that fit each other. Correct config."
        ) from error


def with_lora(model: Any, lora: LoRA, task: str, revision: str | None = None) -> Any:
    """Return a model with LoRA adapters, as peft makes it; only they, the biases asked for and a new head train.

    Args:
        model: of transformers; changed in place.
        lora: settings of peft.LoraConfig.
        task: peft's name of what the model is for: CAUSAL_LM, SEQ_CLS.
        revision: of the model on the Hub, which the adapter's config will name.

    Raises:
        ConfigError: peft is not installed; the model has no such modules.
    """
    try:
        import peft  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"lora={dict(lora)} needs peft, which is not installed; expected it. Run pip install 'mlotool[peft]', or "
            "set lora to null, which trains all parameters."
        ) from error
    settings = {name: list(value) if isinstance(value, list | tuple) else value for name, value in lora.items()}
    try:
        with warnings.catch_warnings():
            # GPT-2 keeps its matrices transposed, which peft sees itself; and it asks transformers for old names.
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(model, peft.LoraConfig(task_type=task, revision=revision, **settings))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"lora={settings}: {_first_line(error)}; expected modules that the model has. Set lora.target_modules to "
            "names of them, or to all-linear."
        ) from error


def _loader(key: str, name: str) -> Any:
    try:
        import transformers  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"{key} needs transformers, which is not installed; expected it. Run pip install 'mlotool[text]'."
        ) from error
    return getattr(transformers, name)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def check_fits(model: str, name: str, size: int, limit: int) -> None:
    """Refuse data that has more of something than a model takes.

    Args:
        model: what it is and where it comes from: "encoder in pretrained=..".
        name: of the setting of the data.
        size: its value.
        limit: the most that the model takes.

    Raises:
        ConfigError: there is more.
    """
    require(size <= limit, name, size, f"at most {limit}, as the {model} has", f"Set data.{name}={limit}.")


# b: batch, t: tokens, w: width of the encoder, k: classes

PADDING = 0


@target("module")
class PretrainedText(nn.Module):
    """A Hugging Face encoder with a linear layer on its first token, as a text classifier.

        logits = W dropout(encoder(tokens)[:, 0])

    The weights are read from safetensors files in `pretrained`; no code and no pickle is run. Attention is computed
    without fused kernels, which have no second derivative. `PretrainedClassifier` uses the model's own head instead of
    the linear layer.

    Args:
        pretrained: a folder with config.json and model.safetensors, as `save_pretrained` writes them; or a name on the
            Hugging Face Hub, which the user has to allow (`--allow-hub`).
        num_classes: k.
        vocabulary_size: number of token ids in the data, at most what the encoder has.
        length: t, at most what the encoder has.
        dropout: dropout probability before the last layer; null: that of the encoder's config.

    Raises:
        ConfigError: transformers is not installed; there is no such encoder; the data does not fit it.

    Source: Devlin et al. 2019, BERT.
    """

    def __init__(
        self,
        pretrained: str,
        num_classes: Count,
        vocabulary_size: Count,
        length: Count,
        dropout: BelowOne | None = None,
    ) -> None:
        super().__init__()
        # The first token goes to the new layer as it is; a pooler's parameters would never get a gradient.
        self.encoder = read_pretrained(pretrained, "AutoModel", "an encoder such as BERT", add_pooling_layer=False)
        config, what = self.encoder.config, f"encoder in pretrained={pretrained}"
        check_fits(what, "vocabulary_size", vocabulary_size, config.vocab_size)
        check_fits(what, "length", length, getattr(config, "max_position_embeddings", length))
        self.dropout = nn.Dropout(getattr(config, "hidden_dropout_prob", 0.1) if dropout is None else dropout)
        self.classifier = nn.Linear(config.hidden_size, num_classes)
        self.train()  # transformers hands its models out in eval mode

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (b, k) of token ids (b, t)."""
        return self.features_and_logits(tokens)[1]

    def features_and_logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the last layer (b, w), and the logits (b, k)."""
        mask = (tokens != PADDING).long()
        features = self.dropout(self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state[:, 0])
        return features, self.classifier(features)


class AbstractPretrained(nn.Module):
    """Base of models that are one of transformers as it is, with or without LoRA adapters.

    Args:
        loader: the class of transformers that makes it, by name.
        kind: of the model, for messages.
        task: peft's name of what it is for.
        pretrained: a folder or a name on the Hub, or None.
        config: of a model with random weights, or None; one of both.
        lora: settings of peft.LoraConfig, or None.
        vocabulary_size: of the data.
        length: of the data.
        sizes: further settings of the model's config.

    Raises:
        ConfigError: transformers or peft is not installed; there is no such model; the data does not fit it.
    """

    def __init__(
        self,
        loader: str,
        kind: str,
        task: str,
        pretrained: str | None,
        config: Mapping[str, Any] | None,
        lora: LoRA | None,
        vocabulary_size: int,
        length: int,
        **sizes: Any,
    ) -> None:
        super().__init__()
        self._pretrained, self._has_lora = pretrained, lora is not None
        if pretrained is not None:
            require(config is None, "config", config, "null beside pretrained", "Set one of them to null.")
            model = read_pretrained(pretrained, loader, kind, **sizes)
            what = f"model in pretrained={pretrained}"
        else:
            advice = "Set pretrained to a folder, or config={model_type: gpt2, ..} for random weights."
            require(config is not None, "pretrained", pretrained, f"{kind}, or config beside null", advice)
            # No start and end of a text: the ids of the model's own may lie beyond the data's.
            ids = {"vocab_size": vocabulary_size, "bos_token_id": None, "eos_token_id": None}
            model = made_of_config(config or {}, loader, {**ids, "max_position_embeddings": length, **sizes})
            what = "model of config"
        check_fits(what, "vocabulary_size", vocabulary_size, model.config.vocab_size)
        check_fits(what, "length", length, getattr(model.config, "max_position_embeddings", length))
        if lora is not None:
            name, _, revision = (pretrained or "").partition("@")
            if revision:
                model.name_or_path = name  # in place of the cache's folder on this machine
            model = with_lora(model, lora, task, revision or None)
        self.model = model
        self.train()  # transformers hands its models out in eval mode

    @property
    def network(self) -> Any:
        """The model of transformers, in which adapters are layers."""
        return self.model.get_base_model() if self._has_lora else self.model

    def save_pretrained(self, folder: Path | str, *, merge: bool = False) -> None:
        """Write the model in the format of Hugging Face's libraries, with its tokenizer if `pretrained` has one.

        With LoRA, only the adapter is written, which `peft.AutoPeftModel..` and `PeftModel.from_pretrained` load
        together with the pretrained model. If the model was made from `config`, its random weights are stored nowhere
        else, so the whole model is written, with the adapters added to its matrices.

        Args:
            folder: the folder to write to; it is made if needed.
            merge: whether to add the adapters to the model's matrices and write the whole model, which can be read
                without peft.

        Raises:
            WriteError: the folder cannot be written.

        Example::

            mlotool.load("outputs/lm_lora_data_mixture/2026-01-31_12-00-00", "model").save_pretrained("adapter")
        """
        model = self.model
        if self._has_lora and (merge or self._pretrained is None):
            model = copy.deepcopy(model).merge_and_unload()
        with writing(Path(folder)):
            model.save_pretrained(folder)
            source = None if self._pretrained is None else hub.folder_of("pretrained", self._pretrained)
            for name in hub.TOKENIZER_FILES:
                if source is not None and (source / name).is_file():
                    shutil.copyfile(source / name, at_home(folder) / name)


@target("module")
class PretrainedClassifier(AbstractPretrained):
    """A Hugging Face model that classifies texts (AutoModelForSequenceClassification), with the model's own head.

    Token id 0 is padding. Attention is computed without fused kernels, which have no second derivative.

    Args:
        pretrained: a folder with config.json and safetensors, as `save_pretrained` writes them; or a name on the
            Hugging Face Hub, which the user has to allow (`--allow-hub`). The head is initialized anew if the folder
            has none.
        num_classes: k.
        vocabulary_size: number of token ids in the data, at most what the model has.
        length: t, at most what the model has.
        config: in place of `pretrained`: `{model_type: bert, hidden_size: 64, ..}`, a model with random weights.
        lora: settings of peft.LoraConfig, such as `{r: 8, lora_alpha: 16, target_modules: [query, value]}`; only the
            adapters and the head are trained. null: all parameters are trained.

    Raises:
        ConfigError: transformers or peft is not installed; there is no such model; the data does not fit it.

    Source: Devlin et al. 2019, BERT; Hu et al. 2022, LoRA.
    """

    def __init__(
        self,
        pretrained: str | None,
        num_classes: Count,
        vocabulary_size: Count,
        length: Count,
        config: Mapping[str, Any] | None = None,
        lora: LoRA | None = None,
    ) -> None:
        sizes = {"num_labels": num_classes, "pad_token_id": PADDING}
        loader, kind = "AutoModelForSequenceClassification", "a model such as BERT"
        super().__init__(loader, kind, "SEQ_CLS", pretrained, config, lora, vocabulary_size, length, **sizes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (b, k) of token ids (b, t)."""
        logits: Tensor = self.model(input_ids=tokens, attention_mask=(tokens != PADDING).long()).logits
        return logits


# b: batch, t: tokens, w: width, v: vocabulary


@target("module")
class PretrainedCausalLM(AbstractPretrained):
    """A Hugging Face language model that predicts each token from the tokens before it (AutoModelForCausalLM).

    Attention is computed without fused kernels, so that second derivatives exist, by double backward and by forward
    mode over reverse mode.

    Args:
        pretrained: a folder with config.json and safetensors, as `save_pretrained` writes them; or a name on the
            Hugging Face Hub, which the user has to allow (`--allow-hub`).
        vocabulary_size: number of token ids in the data, at most what the model has.
        length: t, at most what the model has.
        config: in place of `pretrained`: `{model_type: gpt2, n_embd: 64, ..}`, a model with random weights.
        lora: settings of peft.LoraConfig, such as `{r: 8, lora_alpha: 16, target_modules: [c_attn]}`; only the adapters
            are trained. null: all parameters are trained.

    Raises:
        ConfigError: transformers or peft is not installed; there is no such model; the data does not fit it.

    Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners (GPT-2); Hu et al. 2022, LoRA.
    """

    def __init__(
        self,
        pretrained: str | None,
        vocabulary_size: Count,
        length: Count,
        config: Mapping[str, Any] | None = None,
        lora: LoRA | None = None,
    ) -> None:
        loader, kind = "AutoModelForCausalLM", "a language model such as GPT-2 or Llama"
        super().__init__(loader, kind, "CAUSAL_LM", pretrained, config, lora, vocabulary_size, length)
        self.width: int = self.network.config.hidden_size
        self._is_linear = self._has_linear_head()
        self.train()

    @property
    def head_weight(self) -> Tensor:
        """The matrix (v, w) that maps features to logits."""
        weight: Tensor = self.network.get_output_embeddings().weight
        return weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (b, t, v) for token ids (b, t); those at position i predict the token at position i + 1."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def features(self, tokens: Tensor) -> Tensor:
        """Return the input of the head (b, t, w) for token ids (b, t)."""
        hidden: Tensor = self.network.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

    def losses(self, tokens: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
        """Return the cross-entropy (b, t), in nats, of each token's prediction.

        In a loss, call it as `model.method("losses", tokens, targets)`, where `model` is a role.

        Args:
            tokens: ids (b, t).
            targets: ids (b, t) of the tokens that follow.
            chunk: number of tokens whose logits are in memory at once; None: as many as have 2^22 logits. A model whose
                logits are not just a product with its head (a bias, a cap on logits) computes all at once.
        """
        if not self._is_linear:
            return losses_of_logits(self(tokens), targets)
        return token_losses(self.features(tokens), self.head_weight, targets, chunk)

    @torch.no_grad()
    def _has_linear_head(self) -> bool:
        """Return whether logits are a product of the features and the head, by what the model computes."""
        tokens = torch.arange(min(2, self.network.config.vocab_size), device=self.head_weight.device)[None]
        self.eval()
        logits = self(tokens)
        return LINEAR_HEAD.covers(logits, self.features(tokens) @ self.head_weight.T)
