import pytest
import torch
from torch.overrides import _get_current_function_mode_stack as modes

from mlotool.core.unchanged import restore_torch_settings, torch_settings


@pytest.mark.parametrize(
    ("before", "changed"), [(None, "meta"), (None, "cpu"), ("meta", "cpu"), ("cpu", "meta"), ("cpu", None)]
)
def test_the_default_device_is_put_back(before: str | None, changed: str | None) -> None:
    """No default device is another state than the CPU: with one, each call passes through a mode of torch's."""
    try:
        torch.set_default_device(before)
        kinds, settings = list(map(type, modes())), torch_settings()
        torch.set_default_device(changed)
        assert restore_torch_settings(settings) == ["torch.set_default_device"]
        assert torch_settings() == settings
        assert list(map(type, modes())) == kinds
    finally:
        torch.set_default_device(None)
