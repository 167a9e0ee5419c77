import pytest
import torch
from torch.overrides import _get_current_function_mode_stack as modes

from mlotool.core.unchanged import restore_torch_settings, torch_settings


@pytest.mark.parametrize("found", [None, "meta"])
def test_the_default_device_is_put_back(found: str | None) -> None:
    """No default device is another state than the CPU: with one, each call passes through a mode of torch's."""
    try:
        torch.set_default_device(found)
        before, settings = list(map(type, modes())), torch_settings()
        torch.set_default_device("cpu" if found else "meta")
        assert restore_torch_settings(settings) == ["torch.set_default_device"]
        assert torch_settings() == settings
        assert list(map(type, modes())) == before
    finally:
        torch.set_default_device(None)
