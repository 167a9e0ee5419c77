"""Dynamic memory up the ladder of Chinchilla's sizes (Kemaev et al. 2025, Fig. 7), as far as memory reaches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.mixflow.ablation import LARGE, row_of
from benchmarks.mixflow.setting import Setting, Way


@dataclass(frozen=True)
class Rung:
    """A model of the paper's Table 6: millions of parameters, width, feedforward, size of a head, heads, layers."""

    millions: int
    width: int
    hidden: int
    kv_size: int
    num_heads: int
    num_layers: int


RUNGS = (
    Rung(44, 512, 2048, 64, 8, 8),
    Rung(90, 640, 2560, 64, 10, 13),
    Rung(140, 768, 3072, 64, 12, 15),
    Rung(196, 896, 3584, 64, 14, 16),
    Rung(278, 1024, 4096, 64, 16, 18),
    Rung(489, 1280, 5120, 128, 10, 21),
    Rung(587, 1408, 5632, 128, 11, 21),
    Rung(724, 1536, 6144, 128, 12, 22),
    Rung(1018, 1792, 7168, 128, 14, 23),
)
WAYS = (Way("reverse"), Way("reverse", True), Way("forward", True))


def setting_of(rung: Rung, device: str, *, is_small: bool = False) -> Setting:
    """Return a rung's setting: on a CPU with one short text, in fp32."""
    sizes = {key: value for key, value in rung.__dict__.items() if key != "millions"}
    if is_small:
        sizes = {"num_layers": rung.num_layers // 4, "width": 16, "hidden": 32, "num_heads": 2, "vocabulary_size": 32}
        return replace(LARGE, precision="fp32", device=device).sized(**sizes, kv_size=None, length=8)
    setting = LARGE.sized(**sizes)
    return (
        setting
        if device == "cuda"
        else replace(setting, precision="fp32", device="cpu").sized(length=256, batch_size=1)
    )


def measure(device: str, *, is_small: bool = False, num_rungs: int = 4) -> Mapping[str, Any]:
    """Print and return the memory of each rung and way; on a GPU up to the one that no way can hold."""
    rungs = RUNGS if device == "cuda" else RUNGS[: 2 if is_small else num_rungs]
    rows = []
    print("| millions | way | peak MiB | static | dynamic |\n|---|---|---|---|---|")
    for rung in rungs:
        found = {way.name: attempt(setting_of(rung, device, is_small=is_small).by(way)) for way in WAYS}
        rows.append({"millions": rung.millions, "ways": found})
        for name, each in found.items():
            sizes = "too large" if each is None else " | ".join(f"{x / 2**20:.0f}" for x in each.values())
            print(f"| {rung.millions} | {name} | {sizes} |", flush=True)
        if not any(found.values()):
            break
    return {"setting": setting_of(rungs[0], device, is_small=is_small).record(), "rows": rows}


def attempt(setting: Setting) -> dict[str, Any] | None:
    """Return what a setting takes; None where the device has too little memory."""
    try:
        return row_of(setting, is_timed=False)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
