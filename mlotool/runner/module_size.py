"""How large the modules of a run folder's config are, which may be a stranger's, before there is memory for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration

from mlotool.config import build_module, check
from mlotool.core.errors import ConfigError, MlotoolError

MAX_MODULES = 100_000
SPARE_BYTES = 64_000_000
"""For buffers that no checkpoint holds."""


class _TooLargeError(MlotoolError):
    """More than there is in the checkpoint."""


def check_module_sizes(config: Any, checkpoint: Path) -> None:
    """Refuse modules that are larger than the checkpoint that is to be put into them.

    They are built on torch's device `meta`, where tensors have no memory. What cannot be built there is let through.

    Raises:
        ConfigError: a module has more bytes than the checkpoint's file, or more than MAX_MODULES modules in it.
    """
    check(config, targets=True)
    num_bytes = checkpoint.stat().st_size
    for name in config.problems:
        try:
            with torch.device("meta"), _limited(num_bytes + SPARE_BYTES):
                build_module(config, name)
        except _TooLargeError as found:
            raise ConfigError(
                f"problems.{name}.module: found {found}, while {checkpoint} has {num_bytes} bytes in all; expected the "
                "module that the checkpoint was written of. Put the run's own config.yaml back, and leave out "
                "overrides of the module."
            ) from None
        # Whatever a module does that tensors without values do not allow.
        except Exception:
            continue


@contextmanager
def _limited(num_bytes: int) -> Iterator[None]:
    """Raise _TooLargeError as soon as the modules that are being built have too many bytes, or are too many."""
    total = num_modules = 0

    def count_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal total
        # None, or without a shape yet.
        if isinstance(parameter, torch.Tensor) and not isinstance(parameter, nn.UninitializedParameter):
            total += parameter.numel() * parameter.element_size()
        if total > num_bytes:
            raise _TooLargeError(f"parameters of more than {num_bytes} bytes")

    def count_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal num_modules
        num_modules += 1
        if num_modules > MAX_MODULES:
            raise _TooLargeError(f"more than {MAX_MODULES} modules in it")

    handles = [
        registration.register_module_parameter_registration_hook(count_parameter),
        registration.register_module_module_registration_hook(count_module),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
