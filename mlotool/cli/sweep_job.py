"""The process of one job of a sweep: `python -m mlotool.cli.sweep_job FOLDER`."""

import os
import signal
import sys
import threading
from pathlib import Path

from mlotool.cli.main import EXIT_FAILURE, EXIT_INTERRUPTED
from mlotool.core.escape import escape
from mlotool.core.threads import end_with_threads
from mlotool.sweep.job_folder import JobSpec, has_run, note_failure, read_job
from mlotool.sweep.process import STOP


def main(folder: Path) -> int:
    """Run the job that a folder describes; what became of it stands in its summary.json."""
    _end_with_parent()
    spec = read_job(folder)
    try:
        error = _run(folder, spec)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BaseException as raised:
        error = raised
    if error is None:
        return 0
    note_failure(folder, spec.words, str(error) or type(error).__name__)
    print(f"mlotool: error: {escape(str(error))}", file=sys.stderr)
    return int(getattr(error, "exit_code", EXIT_FAILURE))


def _run(folder: Path, spec: JobSpec) -> BaseException | None:
    from mlotool.cli.hydra_app import call_hydra, open_sources
    from mlotool.cli.job import Job
    from mlotool.cli.request import Request, read_request

    request = read_request(spec.words)
    if spec.recipe_file is not None:
        request = Request(request.recipe, Path(spec.recipe_file), request.overrides)
    open_sources(request, spec.trusted)
    watch = None
    if spec.study is not None:
        from mlotool.sweep.study import Watcher

        watch = Watcher(**spec.study)
    job = Job(spec.command, request.file, spec.trusted, watch=watch)
    quoted = str(folder.absolute()).replace("\\", "\\\\").replace("'", "\\'")
    resume = [f"resume='{quoted}'"] if has_run(folder) else []
    call_hydra([*spec.words, *resume, f"hydra.run.dir='{quoted}'"], job)
    return job.errors[0] if job.errors else None


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
    exit_code = main(Path(sys.argv[1]))
    end_with_threads(exit_code)
    sys.exit(exit_code)
