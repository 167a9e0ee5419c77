"""Layer-parallel training beside serial training and pipelines.

    python -m benchmarks.layerparallel
    python -m benchmarks.layerparallel --parts batched --device cuda

Times are wall times of a training batch, on ranks of one thread each; rivals take turns in short rounds, and ratios are
taken round by round. Serial training with as many threads as there are ranks stands beside them: on one machine it is
the rival to beat.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch

import mlotool
from benchmarks.harness import record
from benchmarks.harness.pair import Pair
from benchmarks.layerparallel import batched, paths, quoted, times
from benchmarks.layerparallel.model import Workload

PARTS = ("paths", "times", "batched")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=("paths", "times"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=Workload.batch_size, help="of the part 'times'")
    parser.add_argument("--device", default="cpu", help="of the part 'batched'; cuda adds CUDA graphs and streams")
    parser.add_argument("--folder", type=Path, default=record.RESULTS, help="of the JSON files; default: results/")
    arguments = parser.parse_args()
    device = _device(arguments.device)
    torch.set_num_threads(1)
    for part in arguments.parts:
        name = f"layerparallel_{part}"
        content: dict[str, Any] = {**record.surroundings(("torch",)), "mlotool": mlotool.__version__}
        content["environment"] = {key: os.environ.get(key) for key in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
        if part == "paths":
            content["rows"] = paths.compare()
            _show_paths(content["rows"])
        elif part == "times":
            with Pair() as pair:
                content |= times.compare(pair, Workload(batch_size=arguments.batch_size), arguments.rounds)
            content["quoted"] = quoted.TABLES
            _show_times(content)
        else:
            # What only a GPU can tell does not take the place of what was measured on a CPU.
            name += f"_{device.type}"
            content |= _batched(device, arguments.rounds)
            _show_batched(content)
        content["load_average_at_the_end"] = os.getloadavg()
        print(f"written to {record.write(name, content, arguments.folder / f'{name}.json')}", flush=True)


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


def _show_times(found: dict[str, Any]) -> None:
    heads = (
        "rival",
        "ms a batch",
        "over 1 thread",
        "fastest rounds",
        "over 2 threads",
        "CPU, busier rank",
        "difference",
    )
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name, wall in found["wall"].items():
        difference = found["difference"].get(name)
        cells = [name, f"{wall['ms']:.0f}", _speedup(wall), f"{1 / wall['ratio_of_fastest']:.2f}"]
        cells += [_speedup(found["wall_over_two_threads"][name]), _speedup(found["cpu_time"][name])]
        cells.append("" if difference is None else f"{difference:.1e}")
        print(f"| {' | '.join(cells)} |")
    print("\n| rival | forward, backward, method: ms | equation 27 (bound) | measured |\n|---|---|---|---|")
    for name, row in found["model_of_speedup"].items():
        seconds = " / ".join(f"{1e3 * row[part]:.0f}" for part in ("forward", "backward", "auxiliary"))
        print(f"| {name} | {seconds} | {row['predicted']:.2f} ({row['bound']:.0f}) | {row['measured']:.2f} |")


def _speedup(summary: dict[str, float]) -> str:
    # A ratio of times below 1 is a speed-up above 1; the quartiles change places.
    middle, low, high = (1 / summary[key] for key in ("ratio", "ratio_quartile_3", "ratio_quartile_1"))
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


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
