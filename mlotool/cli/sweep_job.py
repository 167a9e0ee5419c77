"""The process of one job of a sweep, or of several: `python -m mlotool.cli.sweep_job FOLDER ...`."""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from mlotool.cli.main import EXIT_FAILURE, EXIT_INTERRUPTED, open_streams, plain_warnings
from mlotool.cli.terminal import say
from mlotool.core.process import leave
from mlotool.sweep.job_folder import has_run, note_failure, read_job
from mlotool.sweep.launchers import STOP


def main(folders: Sequence[Path]) -> int:
    """Run the jobs that folders describe; what became of each stands in its summary.json."""
    _end_with_parent()
    from mlotool.cli.sweep_group import run_group

    is_in_group = len(folders) > 1 or read_job(folders[0]).is_in_group
    try:
        with plain_warnings(debug=False):
            error = run_group(folders) if is_in_group else _run_alone(folders[0])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0 if error is None else int(getattr(error, "exit_code", EXIT_FAILURE))


def _run_alone(folder: Path) -> BaseException | None:
    from mlotool.cli.hydra_app import call_hydra, open_sources
    from mlotool.cli.job import Job
    from mlotool.cli.sweep_group import own_words, request_of, watch_of

    spec = read_job(folder)
    try:
        request = request_of(spec)
        open_sources(request, spec.trusted)
        words = [*spec.words, *own_words(folder, is_resumed=has_run(folder))]
        job = Job(spec.command, words, request.file, spec.trusted, watch=watch_of(spec))
        call_hydra(words, job)
        error: BaseException | None = job.errors[0] if job.errors else None
    except KeyboardInterrupt:
        raise
    except BaseException as raised:
        error = raised
    if error is not None:
        note_failure(folder, spec.words, str(error) or type(error).__name__)
        say(f"error: {error}")
    return error


def _end_with_parent() -> None:
    """End at once when the sweep's process has died, and like after Ctrl-C when it asks for that."""

    def watch() -> None:
        while True:
            # Not sys.stdin: a buffer would hold a lock that the exit wants.
            word = os.read(0, 1)
            if word == STOP:
                os.kill(os.getpid(), signal.SIGINT)
            elif word == b"":
                os._exit(EXIT_FAILURE)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    open_streams()
    leave(main([Path(folder) for folder in sys.argv[1:]]))
