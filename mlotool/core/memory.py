"""How much memory there is."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def memory_of(device: "torch.device") -> int | None:
    """Return the bytes of memory that a device has in all; None where nobody says."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
