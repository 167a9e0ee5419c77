"""The ablation of Kemaev et al. 2025, Table 3: mixed mode, block remat and saved inner gradients, by memory and time.

On a GPU it is the paper's 44M transformer in bf16; on a CPU a small one of the same kind in fp32.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.mixflow import measure as measured
from benchmarks.mixflow.setting import PRODUCTS, Setting, Sizes, Way

NUM_CYCLES, NUM_ROUNDS = 1, 5
LARGE = Setting(
    "maml",
    optimizer="adam",
    model="decoder",
    sizes=Sizes(8, 512, 2048, 8, 64, vocabulary_size=32_000, length=2048, batch_size=4),
    precision="bf16",
    device="cuda",
)
SMALL = replace(
    LARGE, sizes=Sizes(8, 64, 256, 4, vocabulary_size=256, length=128, batch_size=4), precision="fp32", device="cpu"
)
TINY = SMALL.sized(num_layers=2, width=16, hidden=32, num_heads=2, length=16)
PAPER = {
    "reverse": (94.2, None),
    "reverse, saved": (76.6, None),
    "reverse + remat": (54.2, 1.33),
    "reverse + remat, saved": (54.5, 1.30),
    "forward": (76.4, None),
    "forward, saved": (76.6, None),
    "forward + remat": (45.2, 1.51),
    "forward + remat, saved": (16.4, 1.19),
}
"""GiB and seconds of a step on a GPU, from the paper's Table 3; the batch and length of its row are not stated."""


def ways() -> Iterator[tuple[str, Way]]:
    """Yield the eight ways by name.

    To save the gradients of the steps is, for reverse products, to keep their graphs: a product needs those.
    """
    for product in PRODUCTS:
        for remat in (False, True):
            for is_saved in (False, True):
                is_kept = is_saved and product == "reverse"
                way = Way(product, remat, keeps_graphs=is_kept, saves_gradients=is_saved)
                yield way.name + (", saved" if is_saved else ""), way


def row_of(setting: Setting, *, is_timed: bool = True) -> dict[str, Any]:
    """Return memory in bytes and the median seconds of the steps with their hypergradient."""
    memory = measured.memory(setting)
    row = {"peak": memory.peak, "static": memory.static, "dynamic": memory.dynamic}
    if is_timed:
        measured.start_steps("ablation", setting)
        measured.go_on("ablation", 1)
        times = [measured.go_on("ablation", NUM_CYCLES) for _ in range(NUM_ROUNDS)]
        measured.stop()
        row |= {"wall": statistics.median(wall for wall, _ in times), "cpu": statistics.median(cpu for _, cpu in times)}
    return row


def setting_of(device: str, *, is_small: bool) -> Setting:
    """Return the setting of a device."""
    if is_small:
        return replace(TINY, device=device)
    return LARGE if device == "cuda" else SMALL


def measure(device: str, *, is_small: bool = False) -> Mapping[str, Any]:
    """Print and return the rows of all ways."""
    base = setting_of(device, is_small=is_small)
    rows: dict[str, Any] = {}
    print("| way | peak MiB | static | dynamic | wall s | CPU s |\n|---|---|---|---|---|---|")
    for name, way in ways():
        found = rows[name] = row_of(base.by(way))
        sizes = " | ".join(f"{found[key] / 2**20:.1f}" for key in ("peak", "static", "dynamic"))
        print(f"| {name} | {sizes} | {found['wall']:.3f} | {found['cpu']:.3f} |", flush=True)
    return {"setting": base.record(), "rows": rows, "paper": PAPER}
