"""Layer-parallel training beside serial training, data parallelism and pipelines.

    python -m benchmarks.layerparallel
    python -m benchmarks.layerparallel --parts times --workloads residual transformer --ranks 2 4 --rounds 5
    python -m benchmarks.layerparallel --show
    python -m benchmarks.layerparallel --parts batched --device cuda

Times are wall times of a training batch, on ranks of one thread each; rivals take turns in short rounds, and ratios are
taken round by round. Serial training with as many threads as there are ranks, and data parallelism on as many ranks,
stand beside them: on one machine they are the rivals to beat. The part `times` writes its file after each setting, and
leaves what the file has of other settings.
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import mlotool
from benchmarks.harness import record
from benchmarks.harness.team import RankError, Team
from benchmarks.layerparallel import batched, figure, paths, quoted, tables, times
from benchmarks.layerparallel.model import Workload
from benchmarks.layerparallel.workload import NUM_BATCHES
from benchmarks.layerparallel.workloads import WORKLOADS

PARTS = ("paths", "times", "batched")
TIMES = "layerparallel_times"


def main() -> None:
    arguments = _arguments()
    if arguments.show:
        _show_times(arguments.folder)
        return
    device = _device(arguments.device)
    torch.set_num_threads(1)
    for part in arguments.parts:
        if part == "times":
            _times(arguments)
            continue
        name, content = f"layerparallel_{part}", _surroundings()
        if part == "paths":
            content["rows"] = paths.compare()
            _show_paths(content["rows"])
        else:
            # What only a GPU can tell does not take the place of what was measured on a CPU.
            name += f"_{device.type}"
            content |= _batched(device, arguments.rounds)
            _show_batched(content)
        content["load_average_at_the_end"] = os.getloadavg()
        print(f"written to {record.write(name, content, arguments.folder / f'{name}.json')}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=("paths", "times"))
    parser.add_argument("--rounds", type=int, default=7, help="at least 2")
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=tuple(WORKLOADS), help="of 'times'")
    parser.add_argument("--ranks", nargs="+", type=int, default=(2,), help="of 'times': numbers of ranks and stages")
    parser.add_argument("--batch-size", type=int, help="of 'times'; default: each workload's own")
    parser.add_argument("--batches", type=int, default=NUM_BATCHES, help="of 'times': distinct ones")
    parser.add_argument(
        "--show", action="store_true", help="print and draw what 'times' has written, and measure nothing"
    )
    parser.add_argument("--device", default="cpu", help="of the part 'batched'; cuda adds CUDA graphs and streams")
    parser.add_argument("--folder", type=Path, default=record.RESULTS, help="of the files; default: results/")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        raise SystemExit(f"--rounds: found {arguments.rounds}; expected at least 2, of which there are quartiles.")
    return arguments


def _surroundings() -> dict[str, Any]:
    environment = {key: os.environ.get(key) for key in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    return {**record.surroundings(("torch",)), "mlotool": mlotool.__version__, "environment": environment}


def _times(arguments: argparse.Namespace) -> None:
    """Measure each setting, and add it to the file."""
    path = arguments.folder / f"{TIMES}.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    content: dict[str, Any] = {"settings": kept.get("settings", {}), "quoted": quoted.TABLES}
    for num_ranks in arguments.ranks:
        with Team(num_ranks) as team:
            for name in arguments.workloads:
                # Each setting says where it comes from: they may be of several calls.
                found = _surroundings()
                workload = replace(WORKLOADS[name](), num_batches=arguments.batches)
                if arguments.batch_size is not None:
                    workload = replace(workload, batch_size=arguments.batch_size)
                try:
                    found |= times.compare(team, workload, arguments.rounds)
                except RankError as error:
                    print(f"{name}, K={num_ranks} has no result: {error}", flush=True)
                    continue
                found["load_average_at_the_end"] = os.getloadavg()
                content["settings"] = _sorted(content["settings"] | {f"{name}, K={num_ranks}": found})
                print(f"\n{tables.setting_table(f'{name}, K={num_ranks}', found)}", flush=True)
                print(f"\nwritten to {record.write(TIMES, content, path)}", flush=True)
    figure.draw(content, path.with_suffix(".png"))


def _sorted(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of few ranks first, in the order of the workloads."""
    names = list(WORKLOADS)
    return dict(sorted(settings.items(), key=lambda each: (each[1]["num_ranks"], names.index(each[0].split(",")[0]))))


def _show_times(folder: Path) -> None:
    path = folder / f"{TIMES}.json"
    if not path.is_file():
        raise SystemExit(f"--show: found no {path}; expected what the part 'times' writes. Run --parts times first.")
    content = json.loads(path.read_text())
    if "settings" not in content:
        raise SystemExit(f"--show: found a file of another form in {path}. Run --parts times, which writes it anew.")
    print(tables.tables(content))
    figure.draw(content, path.with_suffix(".png"))


def _batched(device: torch.device, num_rounds: int) -> dict[str, Any]:
    # On a CPU the deepest network takes seconds a gradient, and tells nothing new.
    depths = batched.NUM_LAYERS if device.type == "cuda" else batched.NUM_LAYERS[:-1]
    found: dict[str, Any] = {"rows": [batched.compare(device, each, num_rounds) for each in depths]}
    if device.type == "cuda":
        found["streams"] = batched.compare_streams(device, Workload(), num_rounds)
    return found


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "--device: found cuda, but torch sees no GPU on this machine; expected one. Leave --device out: the part "
            "'batched' then compares multigrid with a serial pass on the CPU, without CUDA graphs and streams."
        )
    return device


def _show_paths(rows: list[dict[str, Any]]) -> None:
    workers = list(rows[0]["bound_by_workers"])
    print(f"\n| start, relaxation, N | cycles | N/4 workers | paper | 2 cycles | {' | '.join(map(str, workers))} |")
    print("|---" * (5 + len(workers)) + "|")
    for row in rows:
        cells = [f"{row['start']}, {row['relaxation']}, {row['num_layers']}"]
        cells.append(f"{row['cycles_of_states']}+{row['cycles_of_adjoints']}")
        cells.append(f"{row['bound']:.2f}")
        cells.append(" / ".join(str(each) for each in row["paper"].values()))
        cells += [f"{each:.2f}" for each in (row["one_shot_bound"], *row["bound_by_workers"].values())]
        print(f"| {' | '.join(cells)} |")


def _show_batched(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        print(f"\n{row['num_layers']} layers")
        for name, wall in row["wall"].items():
            error = row["error"].get(name)
            print(f"{name}: {wall['ms']:.1f} ms, {wall['ratio']:.2f}{'' if error is None else f', error {error:.1e}'}")
        for name, reason in row["not_captured"].items():
            print(f"{name} could not be captured: {reason}")
    for name, wall in found.get("streams", {}).get("wall", {}).items():
        print(f"{name}: {wall['ms']:.1f} ms, {wall['ratio']:.2f}")


if __name__ == "__main__":
    main()
