import os

import pytest
import torch

# cuBLAS reads it when it starts, which may be before the first run that asks for deterministic algorithms.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

REPEATED = (
    *("test_traced_ticks_take_the_steps_of_the_plans", "test_it_resumes_bit_identically", "test_a_recipe_runs"),
    *("test_it_equals_the_cpu", "test_tasks_equal_the_cpu", "test_reverse_products", "test_finite_differences"),
    *("test_two_stages_with_auxiliary_variables_equal_the_cpu", "test_multigrid_training_equals_the_cpu"),
    *("test_streams_change_nothing", "test_its_state_comes_back_to_the_device"),
)
"""On the CPU their cases say nothing, or what tests of the packages say: without MLOTOOL_TEST_DEVICE one is enough."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let torch's own threads say that they begin: a backward pass may be the first to use cuBLAS."""
    begun: set[str] = set()
    for item in items:
        if item.get_closest_marker("gpu"):
            name = item.name.partition("[")[0]
            if "MLOTOOL_TEST_DEVICE" not in os.environ and name in begun.intersection(REPEATED):
                item.add_marker(pytest.mark.skip("wants MLOTOOL_TEST_DEVICE, cuda or cpu"))
            begun.add(name)
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
