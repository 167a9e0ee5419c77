"""Several runs in one process, each of which leaves an ordinary run folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlotool.config import Origin
from mlotool.runner.objective import Watch
from mlotool.runner.run_config import RunResult, run


@dataclass(frozen=True)
class RunRequest:
    """One run among several of a process.

    Args:
        config: a composed config, which has been checked; its `resume` names the run to go on with.
        output_dir: the run folder.
        origin: where the config came from, for provenance.json; None takes what `compose` knows of it.
        watch: called with tick and objective at each evaluation of the objective; true ends the run as pruned.
        ended_at: the tick at which the run ended in an earlier process, whose place among the others it keeps; None
            where it is to run.
    """

    config: Any
    output_dir: Path
    origin: Origin | None = None
    watch: Watch | None = None
    ended_at: int | None = None


def run_together(
    requests: Sequence[RunRequest],
    *,
    record: Path | None,
    when_ended: Callable[[int, RunResult | BaseException], None],
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
    for number, request in enumerate(requests):
        if request.ended_at is not None:
            continue
        result: RunResult | BaseException
        try:
            result = run(request.config, output_dir=request.output_dir, origin=request.origin, watch=request.watch)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            result = error
        when_ended(number, result)
