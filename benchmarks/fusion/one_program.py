"""Ticks of many runs as one program, beside the same ticks one by one.

    python -m benchmarks.fusion.one_program
    python -m benchmarks.fusion.one_program --rows plain mwn --members 8 32

Each run has a start, a split, noise and batches of its own (seeds 0 to 31). `one by one` are the ticks that a run alone
takes by default; `traced` those with `runner.trace=true`. Parameters are compared first: one program rounds otherwise,
so to a tolerance. A stack that does not gain is run one by one, as in a sweep, and its row says so.
"""

import argparse
import itertools
import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import record
from benchmarks.harness.rounds import interleave, summarize
from mlotool import Graph, Problem, Program, Schedule, Stream, compose
from mlotool.config.building import build
from mlotool.data import InMemoryDataset, Normalization
from mlotool.fusion.freed_memory import keep_freed_memory
from mlotool.fusion.fused_ticks import FusedTicks
from mlotool.losses import cross_entropy

Make = Callable[[int, bool], Schedule]
"""A run by its number; traced or not."""

FUSED, ALONE, TRACED = "as one program", "one by one", "one by one, traced"
NUM_WARMUP = 8
TICKS_AT_A_TIME = 50
"""As `runner.log_every` has it: a run goes on by itself after so many."""
SMALL = ("problems.classifier.module.hidden=[16,16]", "problems.classifier.stream.batch_size=8")


def of_recipe(name: str, *words: str) -> Make:
    """Return runs of a recipe."""

    def make(number: int, is_traced: bool) -> Schedule:
        trace = "true" if is_traced else "auto"
        built = build(compose(name, [f"seed={number}", f"runner.trace={trace}", *words]))
        return Schedule(built.program, with_norms=True)

    return make


def cnn(number: int, is_traced: bool) -> Schedule:
    """Return a run of a CNN with BatchNorm on images of 32 x 32."""
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(256, (512, 3, 32, 32), generator=generator, dtype=torch.uint8)
    data = InMemoryDataset(pixels, torch.arange(512) % 10, Normalization([0.5] * 3, [0.2] * 3))
    torch.manual_seed(number)
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10))
    problem = Problem(
        "model",
        model,
        cross_entropy,
        roles={"model": "model"},
        stream=Stream(data, 32, seed=number),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )
    return Schedule(Program([problem], Graph(), trace="eager" if is_traced else None))


ROWS: dict[str, Make] = {
    "plain": of_recipe("plain"),
    "mwn": of_recipe("mwn", "problems.classifier.warmup_steps=0"),
    "data_cleaning": of_recipe("data_cleaning"),
    "plain, 16 units, batches of 8": of_recipe("plain", *SMALL),
    "mwn, 16 units, batches of 8": of_recipe(
        "mwn", *SMALL, "problems.reweight.stream.batch_size=8", "problems.classifier.warmup_steps=0"
    ),
    "CNN with BatchNorm, 32 x 32": cnn,
}


def together(schedules: Sequence[Schedule]) -> tuple[Callable[[], None], FusedTicks]:
    """Return what takes a tick of all runs of one structure."""
    ticks = FusedTicks(dict.fromkeys(range(len(schedules)), "one structure"))
    for number, schedule in enumerate(schedules):
        ticks.join(number, schedule)
    members, count = range(len(schedules)), itertools.count()

    def take() -> None:
        is_first = next(count) % TICKS_AT_A_TIME == 0
        if is_first:
            ticks.begin(members)
        for outcome in ticks.tick(members, may_have_changed=is_first).values():
            if isinstance(outcome, Exception):
                raise outcome

    return take, ticks


def one_by_one(schedules: Sequence[Schedule]) -> Callable[[], None]:
    """Return what takes a tick of each run."""

    def take() -> None:
        for schedule in schedules:
            schedule.tick()

    return take


def difference(first: Sequence[Schedule], second: Sequence[Schedule]) -> float:
    """Return how far parameters are apart, relative to their norm; the largest of all runs."""
    found = []
    for one, other in zip(first, second, strict=True):
        pairs = [
            (x.detach().double(), y.detach().double())
            for a, b in zip(one.program.problems.values(), other.program.problems.values(), strict=True)
            for x, y in zip(a.theta.values(), b.theta.values(), strict=True)
        ]
        distance = sum(float((x - y).square().sum()) for x, y in pairs)
        found.append((distance / sum(float(x.square().sum()) for x, _ in pairs)) ** 0.5)
    return max(found)


def compare(make: Make, num_members: int, rounds: int, cycles: int) -> dict[str, Any]:
    """Return the times of a tick of all runs in each way."""
    runs = {name: [make(number, name == TRACED) for number in range(num_members)] for name in (FUSED, ALONE, TRACED)}
    fused, ticks = together(runs[FUSED])
    takes = {FUSED: fused, **{name: one_by_one(runs[name]) for name in (ALONE, TRACED)}}
    for _ in range(NUM_WARMUP):
        for take in takes.values():
            take()
    apart = difference(runs[FUSED], runs[ALONE])
    rivals = {name: (lambda take=take: take) for name, take in takes.items()}
    found = interleave(rivals, num_rounds=rounds, num_cycles=cycles, num_warmup=1)
    summary = summarize(found, ALONE, "cpu")
    cpu = {name: [each.cpu for each in seconds] for name, seconds in found.items()}
    verdicts = [verdict for each in ticks.records for verdict in each.verdicts.values()]
    return {
        "members": num_members,
        "ratio": statistics.median(a / f for a, f in zip(cpu[ALONE], cpu[FUSED], strict=True)),
        "ratio_of_fastest": min(cpu[ALONE]) / min(cpu[FUSED]),
        "ratio_to_traced": statistics.median(t / f for t, f in zip(cpu[TRACED], cpu[FUSED], strict=True)),
        "ms": {name: each["ms"] for name, each in summary.items()},
        "ms_fastest": {name: each["ms_fastest"] for name, each in summary.items()},
        "difference": apart,
        "is_fused": [each.is_fused for each in verdicts],
        "reasons": [each.reason for each in verdicts if each.reason]
        + [each.reason for each in ticks.records if each.reason],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--members", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=15, help="cycles of each way in a row, as in a sweep")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/fusion_one_program.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # As the process of a group does.
    keep_freed_memory()
    warnings.simplefilter("ignore")
    where = record.surroundings(("torch", "pytorch-lightning"))
    heads = (
        "runs",
        "members",
        f"{ALONE} / {FUSED}",
        f"{TRACED} / {FUSED}",
        f"ms of a tick of all {FUSED}",
        ALONE,
        TRACED,
    )
    print(f"| {' | '.join(heads)} | parameters apart |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name in arguments.rows:
        for members in arguments.members:
            row = compare(ROWS[name], members, arguments.rounds, arguments.cycles)
            rows.append({"runs": name, **row})
            times = " | ".join(f"{row['ms'][each]:.2f}" for each in (FUSED, ALONE, TRACED))
            text = "" if all(row["is_fused"]) and row["is_fused"] else f" (one by one: {'; '.join(row['reasons'])})"
            print(
                f"| {name}{text} | {members} | {row['ratio']:.2f} | {row['ratio_to_traced']:.2f} | {times} | "
                f"{row['difference']:.1e} |",
                flush=True,
            )
    content = {**where, "num_rounds": arguments.rounds, "rows": rows}
    print(f"\nwritten to {record.write('fusion_one_program', content, arguments.output)}")


if __name__ == "__main__":
    main()
