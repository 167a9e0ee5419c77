"""Everything that only a GPU can show: correctness, speed, memory, training, several ranks.

    python -m benchmarks.gpu --minutes 8 --out DIR
    python -m benchmarks.gpu --minutes 8 --out DIR --only correctness
    python -m benchmarks.gpu --minutes 0 --out DIR --page        # only the page, from what DIR has

Each check runs in a process of its own, for a time of its own, and writes DIR/<check>.json as soon as it has a figure.
What is done in DIR is not done again, and what was begun goes on. On a machine without a network bring the folder that
`make gpu-kit` fills.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import kit
from benchmarks.gpu.check import KINDS, Check

ROOT = Path(__file__).parents[2]
KIT = ROOT / "gpu-kit"
LEAST_SECONDS = 15.0
"""With less time left no check is begun."""

SECONDS_TO_END = 5.0
"""After which a check that does not end is killed."""


def main() -> None:
    """Run what is to do, in the order of its worth; the exit code is 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all checks together")
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--only", help=f"one of {', '.join(KINDS)}, or the name of a check")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, everything small")
    parser.add_argument("--page", action="store_true", help="write DIR/index.html in the end")
    parser.add_argument("--wheels", type=Path, default=KIT / "wheels", help="of the packages that are not installed")
    parser.add_argument("--betty", type=Path, help="a clone of Betty; default: gpu-kit/betty where it is")
    parser.add_argument(
        "--images", type=Path, help="CIFAR-10: a folder with train/<class>/ and test/<class>/, or a tar file of it"
    )
    parser.add_argument("--state", type=Path, help="a tar file: DIR is read from it, and written to it in the end")
    parser.add_argument("--checks", help="a package of checks of your own, in the place of benchmarks.gpu.checks")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu_kit_") as scratch:
        kit.install(arguments.wheels, Path(scratch) / "packages")
        _check_device(arguments.device)
        from benchmarks.gpu.listing import PACKAGE, checks
        from benchmarks.gpu.page import write_page
        from benchmarks.gpu.state import pack_state, unpack_state

        chosen = _chosen(checks(arguments.checks or PACKAGE), arguments.only)
        arguments.out.mkdir(parents=True, exist_ok=True)
        if arguments.state is not None:
            unpack_state(arguments.state, arguments.out)
        states = {}
        try:
            # What has failed before comes after what has not been tried.
            for name in sorted(chosen, key=lambda name: _state(arguments.out / f"{name}.json") == "failed"):
                left = began + 60.0 * arguments.minutes - time.monotonic()
                states[name] = _run(name, chosen[name], arguments, left)
        finally:
            if arguments.page:
                print(f"page: {write_page(arguments.out)}")
            if arguments.state is not None:
                pack_state(arguments.out, arguments.state)
    sys.exit("failed" in states.values())


def _check_device(name: str) -> None:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "--device: found cuda, but torch sees no GPU on this machine; expected one. Add --device cpu for a dry run."
        )


def _chosen(found: dict[str, Check], only: str | None) -> dict[str, Check]:
    chosen = {name: check for name, check in found.items() if only in (None, name, check.kind)}
    if not chosen:
        raise SystemExit(f"--only: found '{only}'; expected one of {', '.join((*KINDS, *found))}.")
    return chosen


def _options(arguments: argparse.Namespace, check: Check) -> list[str]:
    """Return what a check is told."""
    betty = arguments.betty or (KIT / "betty" if (KIT / "betty").is_dir() else None)
    options = ["--device", arguments.device, "--command", _command()]
    options += [] if arguments.checks is None else ["--checks", arguments.checks]
    options += [] if betty is None else ["--betty", str(betty.absolute())]
    if arguments.images is None or check.kind != "training":
        return options
    return [*options, "--images", str(_images(arguments.images).absolute())]


def _command() -> str:
    """Return the command as it was given, but for places, which are the machine's own business."""
    return " ".join(
        ["python -m benchmarks.gpu", *("PATH" if Path(each).is_absolute() else each for each in sys.argv[1:])]
    )


def _images(given: Path) -> Path:
    """Return the folder that holds train/; a tar file is unpacked where the next call finds it again."""
    if given.is_dir():
        return given
    # A run goes on only with the same data.root.
    place = Path(tempfile.gettempdir()) / f"mlotool_gpu_images_{given.stat().st_size}"
    if not place.is_dir():
        part = Path(tempfile.mkdtemp(prefix="mlotool_gpu_images_"))
        with tarfile.open(given) as archive:
            archive.extractall(part, filter="data")
        part.rename(place)
    found = sorted(place.rglob("train"), key=lambda path: len(path.parts))
    if not found:
        raise SystemExit("--images: found no folder train/ in the tar file; expected train/<class>/.")
    return found[0].parent


def _run(name: str, check: Check, arguments: argparse.Namespace, left: float) -> str:
    """Run one check, unless it is done, and say how it ended."""
    file = arguments.out / f"{name}.json"
    if _state(file) == "done":
        print(f"{name}: done before", flush=True)
        return "done"
    if left < LEAST_SECONDS:
        print(f"{name}: not begun, the time is over", flush=True)
        return "not begun"
    options, began = _options(arguments, check), time.monotonic()
    seconds = min(check.seconds, left)
    process = _start([name, "--out", str(arguments.out.absolute()), "--until", f"{began + seconds:.1f}", *options])
    try:
        code = process.wait(seconds + SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        _end(process)
        code = None
    except BaseException:
        _end(process)
        raise
    state = _state(file)
    if code != 0 or state in ("", "begun"):
        # It crashed, or did not listen: its file is as it was at the last figure.
        state = "failed"
        why = f"ended with exit code {code}"
        if code is None:
            why = f"did not end within {seconds:.0f} s, and was killed"
        _note(file, check, {"status": state, "reason": why})
    print(f"{name}: {state} after {time.monotonic() - began:.0f} s", flush=True)
    return state


def _start(words: list[str]) -> "subprocess.Popen[bytes]":
    """Begin a check in a group of its own, which ends as a whole, and with this process."""
    command = [sys.executable, "-m", "benchmarks.gpu.child", *words]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, process_group=0)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a check with all that it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _state(file: Path) -> str:
    return "" if not file.is_file() else str(json.loads(file.read_text()).get("status"))


def _note(file: Path, check: Check, changes: dict[str, Any]) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {"title": check.title, "kind": check.kind, "rows": {}}
    file.write_text(json.dumps({**content, **changes}, indent=2) + "\n")


if __name__ == "__main__":
    main()
