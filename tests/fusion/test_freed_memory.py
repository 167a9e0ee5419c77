"""Freed memory stays with the process, which the number of its page faults shows."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from mlotool.fusion.fused_ticks import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
for _ in range(8):
    torch.zeros(2**24).add_(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.zeros(2**24).add_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_large_tensors_find_the_memory_of_earlier_ones() -> None:
    faults = {
        mode: int(subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, check=True).stdout)
        for mode in ("given_back", "kept")
    }
    assert faults["kept"] * 20 < faults["given_back"], faults
