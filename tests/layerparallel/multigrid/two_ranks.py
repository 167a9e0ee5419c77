"""What ranks compute in test_exchange.py."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlotool.layerparallel import mgrit, mgrit_adjoint
from tests.layerparallel.multigrid.reference import Network
from tests.layerparallel.multigrid.test_mgrit import batched_step, start

NUM_LAYERS = 32
CASES: dict[str, dict[str, Any]] = {
    "F": {"relaxation": "F", "cycles": 2},
    "FCF": {"relaxation": "FCF", "cycles": 2},
    "two grids": {"relaxation": "FCF", "cycles": 1, "levels": 2},
    "F-cycle, nested": {"cycle": "F", "cycles": 1, "nested": True, "coarsening": [2, 2, 2]},
    "tolerance": {"relaxation": "F", "cycles": 9, "relative_tolerance": 1e-2},
}


def compute(group: Any, part: int, num_parts: int) -> dict[str, tuple[Tensor, list[float], Tensor, list[float]]]:
    """Return states, adjoints and residuals of all cases, of this rank's points; also from a warm start."""
    network = Network.random(NUM_LAYERS)
    step, h = batched_step(network), network.h
    # What only one of the ranks has is garbage elsewhere.
    u0 = torch.from_numpy(start()) + (part > 0)
    cotangent = torch.from_numpy(start(2)) + (part < num_parts - 1)
    found = {}
    for name, case in CASES.items():
        states, residuals = mgrit(step, u0, NUM_LAYERS, h, group=group, **case)
        adjoints, adjoint_residuals = mgrit_adjoint(step, states, cotangent, NUM_LAYERS, h, group=group, **case)
        found[name] = states, residuals, adjoints, adjoint_residuals
        warm, more = mgrit(step, u0, NUM_LAYERS, h, group=group, initial=states, **case)
        again, again_residuals = mgrit_adjoint(
            step, warm, cotangent, NUM_LAYERS, h, group=group, initial=adjoints, **case
        )
        found[f"{name}, warm"] = warm, more, again, again_residuals
    return found


def main(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.save(compute(dist.group.WORLD, rank, size), folder / f"rank_{rank}.pt")
    dist.destroy_process_group()
