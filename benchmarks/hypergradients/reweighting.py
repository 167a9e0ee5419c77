"""Fig. 4 of Betty's paper at a REDUCED size: Meta-Weight-Net on long-tailed digits (imbalance 100) with an MLP.

The test loss of every algorithm with 1 and with 5 lower steps an upper one, against upper steps and against time.
"""

import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.hypergradients import long_tail, pictures

FACTOR = 100
NUM_POINTS = 40
KINDS = {
    "unrolled": "ITD-RMAD",
    "identity": "T1-T2",
    "finite_difference_stop": "AID-FD",
    "sama": "SAMA",
    "neumann": "AID-Neumann",
    "cg": "AID-CG",
    "normal_cg": "normal CG",
    "fixed_point": "fixed point",
    "nystrom": "Nystrom",
    "kfac": "K-FAC",
    "soba": "SOBA",
    "saba": "SABA",
    "barrier": "BOME",
}


def measure(folder: Path, num_upper_steps: int, num_seeds: int) -> dict[str, Any]:
    """Return the curves, means over seeds, and draw them.

    Args:
        folder: where the pictures go.
        num_upper_steps: of each run.
        num_seeds: splits and starts.
    """
    rows = []
    for num_steps in (1, 5):
        for kind, name in KINDS.items():
            runs = [_run(kind, num_steps, num_upper_steps, seed) for seed in range(num_seeds)]
            count = min(len(run["loss"]) for run in runs)
            row: dict[str, Any] = {"name": name, "num_steps": num_steps, "step": runs[0]["step"][:count]}
            for key in ("seconds", "loss"):
                row[key] = [sum(run[key][i] for run in runs) / num_seeds for i in range(count)]
            row["last_loss_of_seeds"] = [run["loss"][count - 1] for run in runs]
            rows.append(row)
            print(f"{num_steps} steps, {name}: test loss {row['loss'][-1]:.3f}, {row['seconds'][-1]:.1f} s", flush=True)
        curves = [
            pictures.Curve(each["name"], [each["step"], each["seconds"]], each["loss"])
            for each in rows
            if each["num_steps"] == num_steps
        ]
        title = f"Meta-Weight-Net, reduced size (digits, imbalance {FACTOR}, MLP), {num_steps} lower steps an upper"
        labels = ["upper steps", "CPU seconds, one thread"]
        path = folder / f"hypergradients_reweighting_{num_steps}.png"
        pictures.draw(path, title, labels, f"test loss, mean of {num_seeds} seeds", curves, "y")
    return {"imbalance_factor": FACTOR, "note": "reduced size: digits, MLP", "num_seeds": num_seeds, "rows": rows}


def _run(kind: str, num_steps: int, num_upper_steps: int, seed: int) -> dict[str, list[float]]:
    schedule = long_tail.schedule_of(long_tail.task(FACTOR, seed), kind, num_steps)
    test, model = long_tail.splits(FACTOR, seed)[2], schedule.program.problems["lower"].module
    found: dict[str, list[float]] = {"step": [], "seconds": [], "loss": []}
    elapsed, every = 0.0, max(1, num_upper_steps // NUM_POINTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(1, num_upper_steps + 1):
            start = time.process_time()
            for _ in range(schedule.cycle_length()):
                schedule.tick()
            elapsed += time.process_time() - start
            if number % every:
                continue
            with torch.no_grad():
                loss = float(torch.nn.functional.cross_entropy(model(test["input"]), test["target"]))
            for key, value in (("step", number), ("seconds", elapsed), ("loss", loss)):
                found[key].append(value)
    return found
