"""`mwn_cifar10` as far as the time reaches, beside plain training; the next call goes on with both."""

import json
import os
import signal
import threading
from functools import partial
from typing import Any

from benchmarks.gpu.check import Check, Job, LaterError, SkippedError
from mlotool.core.errors import Interrupted

SMALL = ("runner.max_ticks=30", "problems.classifier.warmup_steps=0", "debug.limit_samples=100")
LARGE = ("data=cifar10_folder_longtailed", "evaluate.splits.val=500", "runner.max_ticks=10000")
SCHEDULER = "{_target_: torch.optim.lr_scheduler.MultiStepLR, milestones: [5000, 7500], gamma: 0.1}"
RUNS = {
    "Meta-Weight-Net": ("mwn_cifar10",),
    # The same network, data, rate and length, without weights.
    "plain": (
        "plain",
        "model@problems.classifier.module=resnet32",
        "problems.classifier.optimizer.lr=0.1",
        "problems.classifier.optimizer.weight_decay=5.0e-4",
        f"problems.classifier.scheduler={SCHEDULER}",
    ),
}
SECONDS_FOR_A_CHECKPOINT = 15.0
SECONDS_OF_A_ROW = 120.0
"""Reading the images takes the first ones."""


def run(job: Job) -> None:
    """Train each for half of the time that is left."""
    if job.images is None and not job.is_small:
        raise SkippedError("it wants CIFAR-10 as folders of images: --images FOLDER_OR_TAR")
    for number, name in enumerate(RUNS):
        if not job.rows.get(name, {}).get("is_finished"):
            job.rows.pop(name, None)
        share = job.seconds_left / (len(RUNS) - number)
        needed = 20.0 if job.is_small else SECONDS_OF_A_ROW * (len(RUNS) - number)
        job.row(name, partial(_trained, job, name, share), seconds=needed)
    if not all(row.get("is_finished") for row in job.rows.values()):
        raise LaterError("trained as far as the rows say")


def _trained(job: Job, name: str, seconds: float) -> dict[str, Any]:
    import mlotool

    recipe, *words = (*RUNS[name], *_words(job))
    if job.is_small:
        recipe, words = "mwn" if name != "plain" else "plain", _words(job)
    folder = job.folder / name.replace(" ", "_")
    config = mlotool.compose(recipe, words)
    # As Ctrl-C would: the run leaves a checkpoint, from which the next call goes on.
    timer = threading.Timer(max(5.0, seconds - SECONDS_FOR_A_CHECKPOINT), os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    # Where the run has not begun to listen yet, or has ended, the signal means nothing.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        mlotool.run(config, output_dir=folder, resume=folder if (folder / "config.yaml").is_file() else None)
    except Interrupted:
        pass
    finally:
        timer.cancel()
    if not (folder / "summary.json").is_file():
        raise LaterError(f"'{name}' had not begun")
    summary = json.loads((folder / "summary.json").read_text())
    metrics = {key: value for key, value in summary["metrics"].items() if key.startswith(("val/", "test/"))}
    return {
        "is_finished": summary["status"] == "finished",
        "num_ticks": summary["num_ticks"],
        "training_s": summary["training_s"],
        "ticks_per_s": summary["num_ticks"] / summary["training_s"],
        **metrics,
    }


def _words(job: Job) -> list[str]:
    words = ["logger=csv", "runner.progress_bar=false", "runner.report=false"]
    words.append(f"runner.accelerator={'cpu' if job.device.type == 'cpu' else 'gpu'}")
    if job.is_small:
        return [*words, *SMALL]
    return [*words, *LARGE, f"data.root={job.images}"]


CHECK = Check("Training of mwn_cifar10", "training", 50, 600.0, run)
