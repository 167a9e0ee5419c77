"""What `cycles: auto` chooses, and what nested iteration brings: bounds by the critical path, no times.

    python -m benchmarks.layerparallel.chosen_cycles

The network of the Peaks data (width 8, T = 5, float64), before and after training it serially, at a gradient of a
batch: the cheapest plan whose gradient is within a relative error of the serial one, on N / 4 workers, as
`MultigridResidual(cycles="auto")` chooses it; each with a start from the first state, and nested.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mlotool
from benchmarks.harness import record
from mlotool.layerparallel import MultigridResidual
from mlotool.layerparallel.multigrid.guard import Choice
from mlotool.models import DenseResidualNetwork

NUM_LAYERS = (64, 256, 1024)
THRESHOLDS = (0.1, 0.01)
LAYERS_PER_WORKER, MAX_CYCLES = 4, 8
NUM_POINTS, NUM_CLASSES, NUM_STEPS = 100, 5, 200
RELAXATIONS = ("F", "FCF")


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for start in ("equal layers", "independent layers"):
        for num_layers in NUM_LAYERS:
            for trained in (False, True):
                rows += _rows(start, num_layers, trained)
    content = {**record.surroundings(("torch",)), "mlotool": mlotool.__version__, "rows": rows}
    print(f"written to {record.write('layerparallel_chosen_cycles', content)}")
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the bounds in Markdown: a row a network, a column a threshold and kind of start."""
    columns = list(dict.fromkeys((row["threshold"], row["relaxation"], row["nested"]) for row in rows))
    heads = [f"{threshold:g}, {kind}{', nested' if nested else ''}" for threshold, kind, nested in columns]
    lines = [f"| network | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(row["network"] for row in rows):
        found = {(row["threshold"], row["relaxation"], row["nested"]): row for row in rows if row["network"] == name}
        lines.append(f"| {name} | {' | '.join(_cell(found[column]) for column in columns)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    if row["bound"] is None:
        return "serial"
    return f"{row['bound']:.1f} (c={row['coarsening']}, {row['cycles']})"


def _rows(start: str, num_layers: int, trained: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    network = DenseResidualNetwork([2], NUM_CLASSES, num_layers, equal_start=start == "equal layers").double()
    points = 6 * torch.rand(NUM_POINTS, 2, dtype=torch.float64) - 3
    # Five classes that a small network can learn: rings around the origin.
    targets = (points.norm(dim=1) / points.norm(dim=1).max() * NUM_CLASSES).long().clamp(max=NUM_CLASSES - 1)
    if trained:
        _train(network, points, targets)
    return [
        {
            "network": f"{start}, N = {num_layers}, {'trained' if trained else 'untrained'}",
            "threshold": threshold,
            "relaxation": relaxation,
            "nested": nested,
            **_chosen(network, points, targets, threshold, relaxation, nested),
        }
        for threshold in THRESHOLDS
        for relaxation in RELAXATIONS
        for nested in (False, True)
    ]


def _train(network: torch.nn.Module, points: Tensor, targets: Tensor) -> None:
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        F.cross_entropy(network(points), targets).backward()
        optimizer.step()


def _chosen(
    network: Any, points: Tensor, targets: Tensor, threshold: float, relaxation: str, nested: bool
) -> dict[str, Any]:
    """Return the plan, its bias and the bound on its speed-up; the bound is None where no plan is near enough."""
    num_layers = network.layers.num_layers
    part = MultigridResidual(
        network.layers,
        cycles="auto",
        relaxation=relaxation,
        nested=nested,
        workers=num_layers // LAYERS_PER_WORKER,
        guard_threshold=threshold,
        guard_max_cycles=MAX_CYCLES,
    )
    F.cross_entropy(network.classifier(part(network.opening(points))), targets).backward()
    guard = part.guard
    assert isinstance(guard, Choice)
    if guard.plan is None:
        return {"bound": None}
    method = guard.plan.forward
    return {
        "coarsening": method.coarsening,
        "cycles": method.cycles,
        "bias": guard.bias,
        "bound": num_layers / guard.plan.cost,
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
