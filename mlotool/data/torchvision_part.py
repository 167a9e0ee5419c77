"""Published files that torchvision knows how to read."""

from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home


def read_with_torchvision(reader: str, root: str, *, is_train: bool, download: bool, files: str, instead: str) -> Any:
    """Return torchvision's data set of this name.

    Args:
        reader: its name, such as `MNIST`.
        root: the folder that holds its folder.
        is_train: which of the two published parts.
        download: fetch the files into `root` where they are missing.
        files: what is expected, for the error.
        instead: what else can be done, for the error.

    Raises:
        ConfigError: the files are not there, or their checksums are not the published ones.
    """
    from torchvision import datasets  # takes a second to import

    folder = at_home(root)
    try:
        return getattr(datasets, reader)(folder, train=is_train, download=download)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"data.root={root}: {reader} could not be read from {folder} ({_reason(error)}); expected {files} there. "
            f"Set data.root to the folder that holds them, or data.download=true{instead}."
        ) from error


def _reason(error: Exception) -> str:
    # torchvision goes on with advice in terms of its own arguments: "You can use download=True to download it".
    return str(error).partition(" You can use ")[0].rstrip(".")
