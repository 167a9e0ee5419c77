"""Reading a Hugging Face model of a folder on this machine: no download, and no code of the folder is run."""

from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def read_pretrained(folder: str, loader: str, kind: str, example: str, known: str, **options: Any) -> Any:
    """Return the model of a folder, in fp32 and eval mode, with attention that has second derivatives.

    Args:
        folder: with config.json and model.safetensors, as `save_pretrained` writes them.
        loader: the class of transformers that reads it, by name.
        kind: of the model, for messages: "encoder".
        example: a model's name on the Hub, for messages.
        known: models of that kind, for messages.
        options: of `from_pretrained`.

    Raises:
        ConfigError: transformers is not installed; the folder holds no such model.
    """
    path = at_home(folder)
    missing = [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]
    if missing:
        raise ConfigError(
            f"folder={folder}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there; expected "
            f"{_with_article(kind)} as save_pretrained writes it, in {CONFIG} and {WEIGHTS}. Download one yourself, "
            f"say the files of {example}, and give its folder on the command line: "
            "problems.<name>.module.folder=<folder>."
        )
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
            f"folder={folder}: no {kind} could be read ({str(error).splitlines()[0]}); expected {known} or one like "
            "it. Give the folder of another one."
        ) from error
    # From transformers 5 on parameters are in the file's precision, but optimizers step those in fp32.
    return model.float()


def check_fits(folder: str, kind: str, name: str, found: int, limit: int) -> None:
    """Refuse data that has more of something than the model takes.

    Args:
        folder: of the model.
        kind: of the model.
        name: of the setting of the data.
        found: its value.
        limit: the most that the model takes.

    Raises:
        ConfigError: there is more.
    """
    if found > limit:
        raise ConfigError(
            f"{name}={found}; expected at most {limit}, as the {kind} in folder={folder} has. Set data.{name}={limit}."
        )


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
