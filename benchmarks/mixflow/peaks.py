"""Memory of one hypergradient of a transformer, four ways, beside the engine before."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.mixflow.setting import BEFORE, WAYS, Setting, Sizes

DEPTHS = (4, 8, 16, 32)
SETTINGS = (
    Setting("maml"),
    Setting("weighting", "implicit"),
    Setting("maml", optimizer="adam"),
    Setting("learning_rate"),
    Setting("learning_rate", optimizer="adam"),
    Setting("weighting"),
    Setting("weighting", optimizer="adam"),
)
LARGEST_DIFFERENCE = 1e-12
"""Of two ways, in float64, relative."""

Call = Callable[..., Any]
"""An `Engine`."""


def depths(now: Call, before: Call | None, *, is_small: bool = False) -> dict[str, Any]:
    """Print and return a row for each setting and depth, growths, and what the allocator says of the first depth.

    Args:
        now: this version.
        before: the version that ratios are to; None: to this version's reverse products.
        is_small: two settings, of few layers.
    """
    rows = []
    for setting in SETTINGS[: 2 if is_small else None]:
        difference = differences(setting, now, before)
        for depth in (2, 3) if is_small else DEPTHS:
            row = row_of(setting.sized(num_layers=depth), now, before)
            rows.append({**row, "num_layers": depth, "difference": difference})
            show(rows[-1:], "layers")
    show(rows, "layers")
    first = Setting().sized(num_layers=rows[0]["num_layers"])
    counts = {way.name: now("counted_and_allocated", first.by(way)) for way in WAYS}
    allocator = {name: {"counted": counted, "allocated": found} for name, (counted, found) in counts.items()}
    return {"rows": rows, "growth_bytes_a_layer": growths(rows), "allocator": allocator}


def sweeps(now: Call, before: Call | None, *, is_small: bool = False) -> dict[str, Any]:
    """Print and return rows of one setting, in which one size at a time moves; arguments as for `depths`."""
    base = Setting().sized(num_layers=2 if is_small else 8)
    points = [("steps", count, replace(base, num_steps=count)) for count in (2, 4, 8)]
    points += [("length", length, base.sized(length=length)) for length in (32, 64, 128, 256)]
    points += [("batch_size", size, base.sized(batch_size=size)) for size in (2, 4, 8, 16)]
    rows = []
    for name, value, setting in points[:1] if is_small else points:
        rows.append({"swept": name, "value": value, **row_of(setting, now, before)})
        show(rows[-1:], "value")
    show(rows, "value")
    return {"rows": rows}


def row_of(setting: Setting, now: Call, before: Call | None) -> dict[str, Any]:
    """Return what each way takes, in bytes, and the ratio of dynamic memory to it."""
    found = {} if before is None else {BEFORE: before("memory", setting)}
    found |= {way.name: now("memory", setting.by(way)) for way in WAYS}
    base = next(iter(found.values()))
    return {
        "title": setting.title,
        "setting": setting.record(),
        "memory": {
            name: {
                "peak": each.peak,
                "static": each.static,
                "dynamic": each.dynamic,
                "ratio": base.dynamic / each.dynamic,
            }
            for name, each in found.items()
        },
    }


def differences(setting: Setting, now: Call, before: Call | None) -> dict[str, float]:
    """Return how far the ways' gradients are apart in float64, relative, on two narrow layers.

    Raises:
        SystemExit: they are apart.
    """
    sizes = Sizes(num_layers=2, width=8, num_heads=2, vocabulary_size=8, length=6, batch_size=3)
    exact = Setting(setting.task, setting.algorithm, setting.optimizer, sizes=sizes, dtype="float64")
    found = {} if before is None else {BEFORE: before("gradient", exact)}
    found |= {way.name: now("gradient", exact.by(way)) for way in WAYS}
    base = next(iter(found.values()))
    apart = {name: float(np.linalg.norm(each - base) / np.linalg.norm(base)) for name, each in found.items()}
    if not max(apart.values()) <= LARGEST_DIFFERENCE:
        raise SystemExit(
            f"{setting.title}: in float64 the gradients differ by {apart}; expected at most {LARGEST_DIFFERENCE}. The "
            "ways do different work: nothing is reported."
        )
    return apart


def growths(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the bytes of dynamic memory that a layer adds, by title and way, between the two deepest models."""
    found: dict[str, dict[str, float]] = {}
    for title in dict.fromkeys(row["title"] for row in rows):
        own = [row for row in rows if row["title"] == title and "num_layers" in row][-2:]
        if len(own) < 2:
            continue
        layers = own[1]["num_layers"] - own[0]["num_layers"]
        found[title] = {
            name: (own[1]["memory"][name]["dynamic"] - own[0]["memory"][name]["dynamic"]) / layers
            for name in own[0]["memory"]
        }
    return found


def show(rows: Sequence[Mapping[str, Any]], label: str) -> None:
    """Print a table of peak / static / dynamic MiB with the ratio."""
    names = list(rows[0]["memory"])
    print(f"| {' | '.join(['', label, *names])} |\n{'|---' * (len(names) + 2)}|")
    for row in rows:
        value = row["value"] if "swept" in row else row["num_layers"]
        kind = f"{row['swept']}" if "swept" in row else row["title"]
        print(f"| {' | '.join([kind, str(value), *(_cell(row['memory'][name]) for name in names)])} |")
    for title, growth in growths(rows).items():
        print(f"MiB a layer, {title}: " + ", ".join(f"{name} {each / 2**20:.2f}" for name, each in growth.items()))


def _cell(memory: Mapping[str, float]) -> str:
    peak, static, dynamic = (f"{memory[key] / 2**20:.1f}" for key in ("peak", "static", "dynamic"))
    return f"{peak} / {static} / **{dynamic}** ({memory['ratio']:.1f})"
