"""Wall time of the command line's verbs that must not wait for torch, the interpreter's own start included.

    python -m benchmarks.cli_startup

Each command runs in a new process; the median of `--rounds` is kept. Rounds interleave the commands, after one round
that fills the disk cache and is not counted.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import record

COMMANDS = {
    "--help": ["--help"],
    "completion of a verb": ["-sc", "query=bash"],
    "completion of a recipe": ["-sc", "query=bash"],
    "completion of a group": ["-sc", "query=bash"],
    "completion of a key": ["-sc", "query=bash"],
    "list": ["list"],
    "show": ["show", "mwn"],
    "validate": ["validate", "mwn"],
}
LINES = {
    "completion of a verb": "mlotool sh",
    "completion of a recipe": "mlotool run ",
    "completion of a group": "mlotool run mwn hypergradient=",
    "completion of a key": "mlotool run mwn problems.classifier.op",
}
LIMITS = {"--help": 0.3, "show": 1.5, "validate": 1.5, **dict.fromkeys(LINES, 0.3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    walls: dict[str, list[float]] = {name: [] for name in COMMANDS}
    cpus: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name in COMMANDS:
                wall, cpu = _time(name, folder)
                if number:
                    walls[name].append(wall)
                    cpus[name].append(cpu)
    rows = {
        name: {
            "median_s": round(statistics.median(walls[name]), 3),
            "max_s": round(max(walls[name]), 3),
            "cpu_s": round(statistics.median(cpus[name]), 3),
            "limit_s": LIMITS.get(name),
        }
        for name in COMMANDS
    }
    path = record.write("cli_startup", {**record.surroundings(("hydra-core", "omegaconf")), "rows": rows})
    for name, row in rows.items():
        limit = "" if row["limit_s"] is None else f"limit {row['limit_s']} s"
        print(f"{name:<24} median {row['median_s']:.3f} s  max {row['max_s']:.3f} s  cpu {row['cpu_s']:.3f} s  {limit}")
    print(path)


def _time(name: str, folder: str) -> tuple[float, float]:
    """Return elapsed and CPU seconds; on a busy machine the second says what an idle one would take."""
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    )
    if name in LINES:
        environment |= {"COMP_LINE": LINES[name], "COMP_POINT": str(len(LINES[name]))}
    command = [sys.executable, "-m", "mlotool", *COMMANDS[name]]
    wall, cpu = time.perf_counter(), _cpu_of_children()
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - wall, _cpu_of_children() - cpu


def _cpu_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    main()
