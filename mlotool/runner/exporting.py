"""The weights of a finished run's module, for people without mlotool: safetensors, or what the module itself saves."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.core.user_code import Call, noted, user_code
from mlotool.folders.files import replacing, writing
from mlotool.folders.hub import WEIGHTS
from mlotool.runner.loading import load


def export(
    run_dir: Path | str,
    problem: str,
    folder: Path,
    checkpoint: str = "best",
    *,
    overrides: Sequence[str] = (),
) -> nn.Module:
    """Write the weights of a problem's module into a folder, and return the module.

    A module with a method `save_pretrained` (of Hugging Face's transformers and PEFT) writes its own files; all others
    are written as `model.safetensors`, a tensor for each name of their `state_dict`.

    Args:
        run_dir: the run folder.
        problem: the problem's name.
        folder: that takes the files; it is made where it is missing.
        checkpoint: "best" or "last".
        overrides: as for `mlotool.load`.

    Raises:
        ConfigError: as `mlotool.load`; a state that safetensors cannot hold; safetensors is not installed.
        WriteError: the disk does not take the files.
    """
    module = load(run_dir, problem, checkpoint, overrides=overrides)
    save = getattr(module, "save_pretrained", None)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if callable(save):
        call = Call(f"problems.{problem}.module", save, {"folder": str(folder)}, "files in that folder")
        with user_code(ConfigError), noted(lambda: call):
            save(str(folder))
        return module
    _write(_tensors(problem, module.state_dict()), folder / WEIGHTS)
    return module


def _tensors(problem: str, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a state as tensors of their own: safetensors refuses those that share memory, as tied weights do."""
    odd = next((key for key, value in state.items() if not isinstance(value, torch.Tensor) or value.is_sparse), None)
    if odd is not None:
        raise ConfigError(
            f"problems.{problem}.module: found '{odd}' in its state, which is not a dense tensor; expected only dense "
            "tensors. Give the module a method save_pretrained(folder), which writes its files."
        )
    return {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}


def _write(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError("export: safetensors is not installed; expected it. Run: pip install safetensors") from error
    with replacing(path) as temporary:
        try:
            mode = temporary.stat().st_mode
            # `format` is what Hugging Face's readers ask for.
            save_file(dict(tensors), temporary, metadata={"format": "pt"})
            # It writes a file of its own, which the user alone may read.
            with suppress(PermissionError):
                temporary.chmod(mode)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ConfigError(
                f"export: safetensors cannot hold the state ({error}). Save tensors of other types."
            ) from error
