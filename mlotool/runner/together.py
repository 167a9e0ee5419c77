"""Several runs in one process, each of which leaves an ordinary run folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mlotool.config.sweep_plan import structure_of
from mlotool.config.user_data import SharedData
from mlotool.core.sigterm import terminable
from mlotool.distributed.collectives import Ranks
from mlotool.fusion.freed_memory import keep_freed_memory
from mlotool.fusion.fused_ticks import FusedTicks
from mlotool.runner.company import Company
from mlotool.runner.device import count_devices, find_device
from mlotool.runner.fusion_record import FusionRecord
from mlotool.runner.memory_room import MemoryRoom
from mlotool.runner.process_settings import announcements, quiet_lightning, torch_settings, untracked_past
from mlotool.runner.run_config import RunResult, run, run_here
from mlotool.runner.run_request import RunRequest
from mlotool.runner.seat import AbstractSeat

__all__ = ["RunRequest", "run_together"]

WhenEnded = Callable[[int, RunResult | BaseException], None]

_OF_THE_PROCESS = ("num_threads", "deterministic", "tf32")
"""Settings of a run that concern its whole process."""


def run_together(
    requests: Sequence[RunRequest],
    *,
    record: Path | None,
    when_ended: WhenEnded,
) -> None:
    """Run several configs in this process; one that fails does not end the others.

    Args:
        requests: the runs, in the order that they had in an earlier process that was to run them; those that have
            ended there are among them.
        record: a file that takes which of them ran as one program, with the times measured; None writes none.
        when_ended: called with a run's place in `requests` and its result or error, as soon as it has ended; not for
            those that had ended before.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the runs have written their checkpoints and summaries.
    """
    alone = [number for number, each in enumerate(requests) if count_devices(each.config.runner) > 1]
    together = [number for number in range(len(requests)) if number not in alone]
    book = FusionRecord(record, [_job(each) for each in requests])
    for number in alone:
        book.note([number], "runner.devices is above 1: each has processes of its own")
    for settings in dict.fromkeys(_of_process(requests[number]) for number in together):
        members = {number: requests[number] for number in together if _of_process(requests[number]) == settings}
        _run_company(members, book, when_ended)
    for number in alone:
        if requests[number].ended_at is None:
            _run_alone(number, requests[number], when_ended)


def _run_company(requests: Mapping[int, RunRequest], book: FusionRecord, when_ended: WhenEnded) -> None:
    """Run those that ask for the same settings of the process, as many at a time as there is memory for."""
    runner = next(iter(requests.values())).config.runner
    keep_freed_memory()
    with (
        torch_settings(**{key: runner[key] for key in _OF_THE_PROCESS}),
        quiet_lightning(),
        terminable(),
        announcements(),
        untracked_past(),
    ):
        device, shared = find_device(runner), SharedData()
        waiting = list(requests)
        while waiting:
            # Those that began together in an earlier process do so again, however much memory there is now.
            known = book.began_together(waiting)
            members = known or waiting
            ends = {number: end for number in members if (end := requests[number].ended_at) is not None}
            structures = {number: structure_of(requests[number].config) for number in members}
            runs = {number: partial(_run, requests[number], device) for number in members if number not in ends}
            company = Company(runs, shared, when_ended)
            company.ticks = FusedTicks(structures, ends, book.stacks(), book.take, company.world)
            with company.interrupt.listening():
                left = company.begin((lambda: True) if known else MemoryRoom(device).takes_one_more)
                if not company.interrupt.requested:
                    book.begin([number for number in members if number in ends or company.has_place(number)])
                company.run()
            waiting = [number for number in waiting if number in left or number not in members]


def _run(request: RunRequest, device: torch.device, seat: AbstractSeat) -> RunResult:
    resume = request.resume or request.config.get("resume")
    return run_here(replace(request, resume=resume), device, Ranks(), seat)


def _run_alone(number: int, request: RunRequest, when_ended: WhenEnded) -> None:
    result: RunResult | BaseException
    try:
        result = run(request.config, output_dir=request.output_dir, origin=request.origin, watch=request.watch)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        result = error
    when_ended(number, result)


def _of_process(request: RunRequest) -> tuple[Any, ...]:
    return tuple(request.config.runner[key] for key in ("num_threads", "deterministic", "tf32", "accelerator"))


def _job(request: RunRequest) -> int:
    """Return the number of a run's job in its sweep, by which its folder is named."""
    name = "" if request.output_dir is None else request.output_dir.name
    return int(name) if name.isdigit() else -1
