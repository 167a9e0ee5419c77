"""One check in a process of its own: `python -m benchmarks.gpu.child NAME --out DIR --until T ...`."""

import argparse
import json
import os
import signal
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.gpu.check import Job, LaterError, SkippedError
from benchmarks.gpu.listing import PACKAGE, load

SECONDS_BEFORE_THE_END = 3.0
"""For the last words."""

SECONDS_BETWEEN_ALARMS = 5.0
"""One may be swallowed, by a compiler or a finalizer."""


def main() -> None:
    """Run the check; the file says how it ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="by time.monotonic, which processes share")
    parser.add_argument("--command", default="", help="of the kit, for the file")
    parser.add_argument("--device", required=True)
    parser.add_argument("--checks", default=PACKAGE)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--betty", type=Path)
    arguments = parser.parse_args()
    file = arguments.out / f"{arguments.name}.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    deadline = arguments.until - SECONDS_BEFORE_THE_END
    check = load(arguments.name, arguments.checks)
    # Lightning sets it when it is imported, and every optimizer step would ask NVML for a GPU.
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    content: dict[str, Any] = {"title": check.title, "kind": check.kind, "status": "begun"}
    content |= {"rows": before.get("rows", {}), "calls": [*before.get("calls", []), _surroundings(arguments)]}
    job = Job(
        torch.device(arguments.device),
        arguments.out / arguments.name,
        file,
        deadline,
        content,
        arguments.images,
        arguments.betty,
    )
    job.save()
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, job.seconds_left), SECONDS_BETWEEN_ALARMS)
    began = time.monotonic()
    try:
        check.run(job)
        failed = [name for name, row in job.rows.items() if isinstance(row, dict) and "error" in row]
        content["status"] = "failed" if failed else "done"
    except SkippedError as reason:
        content |= {"status": "skipped", "reason": str(reason)}
    except (LaterError, TimeoutError) as reason:
        content |= {"status": "unfinished", "reason": str(reason) or "the time was over"}
    except BaseException as error:
        content |= {"status": "failed", "reason": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        content["calls"][-1]["seconds"] = time.monotonic() - began
        job.save()


def _surroundings(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.harness.record import surroundings

    found = surroundings(("torch", "torchvision", "pytorch-lightning", "numpy"))
    found["command"] = arguments.command
    if arguments.device != "cuda":
        found["device"] = "cpu"
    elif torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        found["num_gpus"] = torch.cuda.device_count()
    return found


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("the time was over")


if __name__ == "__main__":
    main()
