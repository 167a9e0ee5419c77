import os

import pytest
import torch

# cuBLAS reads it when it starts, which may be before the first run that asks for deterministic algorithms.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let torch's own threads say that they begin: a backward pass may be the first to use cuBLAS."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"))
            # What a compiler says of TF32, which is off on purpose.
            item.add_marker(pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tests compute: MLOTOOL_TEST_DEVICE (`cuda`, `cuda:1`), or the CPU."""
    found = torch.device(os.environ.get("MLOTOOL_TEST_DEVICE", "cpu"))
    return torch.device("cuda", 0) if found.type == "cuda" and found.index is None else found


@pytest.fixture(scope="session")
def accelerator(device: torch.device) -> str:
    """The same for a recipe's `runner.accelerator`, which takes the first GPU."""
    return "gpu" if device.type == "cuda" else "cpu"
