"""Folders of runs and sweeps as they would have left them."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml


def problem(target: str, lr: float, **settings: Any) -> dict[str, Any]:
    loss = {"_target_": "mlotool.losses.cross_entropy", "roles": {}}
    parts = {"module": {"_target_": f"mlotool.models.{target}"}, "loss": loss, "hypergradient": None, "unroll_steps": 1}
    return {**parts, "optimizer": {"_target_": "torch.optim.SGD", "lr": lr}, **settings}


def mwn_config() -> dict[str, Any]:
    solver = {"_target_": "mlotool.hypergradient.Identity"}
    implicit = {"_target_": "mlotool.hypergradient.Implicit", "solver": solver, "product": "finite_difference"}
    roles = {"model": "classifier", "weigher": "reweight"}
    return {
        "name": "mwn",
        "seed": 0,
        "hypergradient": implicit,
        "problems": {"reweight": problem("WeightNet", 1e-3), "classifier": problem("MLP", 0.1, unroll_steps=5)},
        "graph": {"upper_to_lower": {"reweight": ["classifier"]}, "lower_to_upper": {"classifier": ["reweight"]}},
        "evaluate": {"problem": "classifier", "metrics": ["accuracy"], "splits": {"val": 100, "test": "end"}},
        "objective": "val/accuracy",
        "objective_mode": "max",
        "analyses": {"weights": {"_target_": "mlotool.losses.weight_against_loss", "roles": roles}},
    }


def mwn_rows(num_ticks: int = 1000) -> list[tuple[int, str, float]]:
    rng = np.random.default_rng(0)
    rows: list[tuple[int, str, float]] = []
    for tick in range(10, num_ticks + 1, 10):
        rows.append((tick, "classifier/loss", 2.3 * np.exp(-tick / 250) + 0.25 + 0.08 * rng.normal()))
        rows.append((tick, "classifier/lr", 0.05 * (1 + np.cos(np.pi * tick / num_ticks))))
        rows.append((tick, "classifier/gradient_norm", 3 * np.exp(-tick / 300) * np.exp(0.3 * rng.normal())))
        rows.append((tick, "reweight/loss", 1.9 * np.exp(-tick / 180) + 0.3 + 0.05 * rng.normal()))
        rows.append((tick, "reweight/lr", 1e-3))
        if tick % 100 == 0:
            accuracy = 0.94 - 0.6 * np.exp(-tick / 150) - (0.02 if tick > 800 else 0)
            rows.append((tick, "val/accuracy", accuracy))
            rows.append((tick, "val/loss", 1.6 * np.exp(-tick / 220) + 0.2))
    rows += [(num_ticks, "test/accuracy", 0.9127), (num_ticks, "test/loss", 0.3121)]
    rows += [(num_ticks, "weights/wrong_label_auc", 0.9731)]
    return rows


def mwn_summary() -> dict[str, Any]:
    metrics = {"classifier/loss": 0.28731, "classifier/lr": 0.0, "reweight/loss": 0.3142, "val/accuracy": 0.91924}
    return {
        "status": "finished",
        "objective": {"key": "val/accuracy", "value": 0.9371, "mode": "max"},
        "metrics": {**metrics, "test/accuracy": 0.9127, "weights/wrong_label_auc": 0.9731},
        "best": {"tick": 800, "metrics": {"val/accuracy": 0.9371, "val/loss": 0.2423}},
        "error": None,
        "num_ticks": 1000,
        "training_s": 61.2,
    }


def provenance() -> dict[str, Any]:
    return {
        "command": "mlotool run +recipe=mwn seed=0 problems.classifier.optimizer.lr=0.1",
        "recipe_path": "recipes/mwn.yaml",
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": True},
        "versions": {"mlotool": "0.1.0", "torch": "2.9.0", "pytorch-lightning": "2.5.1"},
        "python": "3.12.3",
        "platform": "Linux-6.8-x86_64",
        "device": "cpu",
        "seed": 0,
        "duration_s": 72.4,
        "started": "2025-01-31T10:00:00",
        "finished": "2025-01-31T10:01:12",
    }


def weight_arrays(num: int = 1437) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    clean = rng.random(num) > 0.4
    loss = np.where(clean, rng.gamma(1.5, 0.25, num), 2.2 + rng.gamma(3.0, 0.5, num))
    weight = 1 / (1 + np.exp(2.2 * (loss - 1.6))) + 0.03 * rng.normal(size=num)
    return {"loss": loss, "weight": np.clip(weight, 0, 1), "clean": clean}


def write_metrics(folder: Path, rows: Iterable[tuple[int, str, float]]) -> None:
    with (folder / "metrics.csv").open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["tick", "key", "value"])
        writer.writerows(rows)


def write_run(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    rows: Iterable[tuple[int, str, float]] | None = None,
    summary: Mapping[str, Any] | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
    recipe: str = "# @package _global_\nname: mwn\n",
) -> Path:
    """Write a run folder; what is not given is that of a finished Meta-Weight-Net, without its weights."""
    (folder / "artifacts").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(config or mwn_config()), sort_keys=False))
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "overrides.txt").write_text("seed=0\nproblems.classifier.optimizer.lr=0.1\n")
    (folder / "provenance.json").write_text(json.dumps(provenance()))
    (folder / "summary.json").write_text(json.dumps(dict(summary or mwn_summary())))
    write_metrics(folder, mwn_rows() if rows is None else rows)
    if arrays is not None:
        np.savez(folder / "artifacts" / "weights.npz", **arrays)
    return folder


FIXED = ("+recipe=mwn", "runner.max_ticks=60")


def write_job(
    folder: Path,
    *words: str,
    status: str | None = "finished",
    value: float | None = None,
    key: str = "val/loss",
    mode: str = "min",
    curve: Sequence[float] = (),
    metrics: Mapping[str, float] | None = None,
    at_best: Mapping[str, float] | None = None,
    error: str | None = None,
) -> Path:
    """Write the folder of a job that ended; without a status, that of one that has begun.

    `at_best` are metrics of the best checkpoint, at tick 50 of 60, of the splits val and test.
    """
    folder.mkdir(parents=True)
    (folder / "overrides.txt").write_text("\n".join((*FIXED, *words)))
    if curve:
        write_metrics(folder, [(10 * (index + 1), key, each) for index, each in enumerate(curve)])
    if status is not None:
        summary: dict[str, Any] = {"status": status, "objective": {"key": key, "value": value, "mode": mode}}
        last, best = dict(metrics or {}), dict(at_best or {})
        summary |= {"metrics": last | best, "error": error, "num_ticks": 60, "training_s": 1.5, "best": {"tick": 50}}
        summary["ticks"] = dict.fromkeys(last, 60) | dict.fromkeys(best, 50)
        (folder / "summary.json").write_text(json.dumps(summary))
        if best:
            (folder / "config.yaml").write_text("evaluate: {splits: {val: 10, test: end}}\n")
        (folder / "report.html").write_text("<p>a job's page</p>")
    return folder


def write_begun(folder: Path, *words: str) -> Path:
    """Write the folder of a job whose process has only begun."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"words": [*FIXED, *words]}))
    return folder


def write_plan(folder: Path, num_jobs: int, *, log_keys: Sequence[str] = (), **num_values: int) -> None:
    """Write what the sweep was asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {key: {"num_values": count, "is_log": False} for key, count in num_values.items()}
    keys |= {key: {"num_values": 0, "is_log": True} for key in log_keys}
    content = {"objective": "val/loss", "mode": "min", "num_jobs": num_jobs, "keys": keys}
    (folder / "plan.json").write_text(json.dumps(content))


Node = dict[str, Any]


def node(name: str, *inputs: str, kind: str = "Linear", mutator: str | None = None) -> Node:
    return {"id": name, "kind": kind, "inputs": list(inputs), "shape": [16, 8, 8], "mutator": mutator}


def residual(num_blocks: int, changed: Sequence[int] = ()) -> list[Node]:
    """Return a network of residual blocks, of which some have another convolution."""
    nodes = [node("images", kind="placeholder"), node("stem", "images", kind="Conv2d")]
    for number in range(num_blocks):
        before, name = nodes[-1]["id"], f"blocks.{number}"
        mutator = "kernel" if number in changed else None
        nodes.append(node(f"{name}.convolution", before, kind="Conv2d", mutator=mutator))
        nodes.append(node(f"{name}.norm", f"{name}.convolution", kind="BatchNorm2d"))
        nodes.append(node(f"{name}:add", f"{name}.norm", before, kind="add"))
        nodes.append(node(f"{name}:relu", f"{name}:add", kind="relu"))
    return [*nodes, node("output", nodes[-1]["id"], kind="output")]


def cells(num_cells: int) -> list[Node]:
    """Return cells that read the two before, each of three pairs of changed nodes."""
    nodes = [node("images", kind="placeholder"), node("stem", "images")]
    before, last = "stem", "stem"
    for number in range(num_cells):
        name, parts = f"cell_{number}", []
        for pair, source in enumerate((before, last, last)):
            parts.append(f"{name}_{pair}_add")
            nodes += [node(f"{name}_{pair}_{side}", source, mutator="cell") for side in ("left", "right")]
            nodes.append(node(parts[-1], f"{name}_{pair}_left", f"{name}_{pair}_right", mutator="cell"))
        nodes.append(node(name, *parts, kind="cat", mutator="cell"))
        before, last = last, name
    return [*nodes, node("output", last, kind="output")]


def write_nodes(folder: Path, nodes: Sequence[Any], decisions: Mapping[str, str] | None = None, **record: Any) -> Path:
    """Write nodes.json of one problem."""
    both = {"candidates": ["k3", "k5"], "num_candidates": 2}
    made = [{"name": name, "value": value, **both} for name, value in (decisions or {}).items()]
    content = {"num_parameters": 19074, "num_nodes": len(nodes), "nodes": list(nodes), "decisions": made, **record}
    (folder / "nodes.json").write_text(json.dumps({"problems": {"classifier": content}}))
    return folder
