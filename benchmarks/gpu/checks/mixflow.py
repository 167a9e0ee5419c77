"""Meta-gradients of language models (Kemaev et al. 2025): the ablation of Table 3 on 44M, and Fig. 7 up the ladder."""

from functools import partial
from typing import Any

from benchmarks.gpu.check import Check, Job
from benchmarks.mixflow import ablation, ladder
from benchmarks.mixflow.setting import Setting


def run(job: Job) -> None:
    """A row for each way on the 44M decoder in bf16, and for each size of the ladder with each way."""
    base = ablation.setting_of(job.device.type, is_small=job.is_small)
    for name, way in ablation.ways():
        job.row(f"44M, {name}", partial(_timed, name, base.by(way)), seconds=25.0)
    for rung in ladder.RUNGS[: 2 if job.is_small else None]:
        setting = ladder.setting_of(rung, job.device.type, is_small=job.is_small)
        for way in ladder.WAYS:
            job.row(f"{rung.millions}M, memory of {way.name}", partial(_memory, setting.by(way)), seconds=25.0)


def _timed(name: str, setting: Setting) -> dict[str, Any]:
    found = ablation.row_of(setting)
    gibibytes, seconds = ablation.PAPER[name]
    return _in_mebibytes(found) | {"the paper's peak, GiB": gibibytes, "the paper's seconds": seconds}


def _memory(setting: Setting) -> dict[str, Any]:
    return _in_mebibytes(ablation.row_of(setting, is_timed=False))


def _in_mebibytes(found: dict[str, Any]) -> dict[str, Any]:
    sizes = ("peak", "static", "dynamic")
    return {f"{key}_mib": found[key] / 2**20 for key in sizes} | {
        f"{key}_seconds": found[key] for key in ("wall", "cpu") if key in found
    }


CHECK = Check("Meta-gradients of language models (MixFlow-MG)", "memory", 28, 300.0, run)
