"""The words of a sweep's job, as its process hands them to Hydra."""

from pathlib import Path

from mlotool.cli.request import Request, read_request
from mlotool.sweep.job_folder import JobSpec


def request_of(spec: JobSpec) -> Request:
    """Return what a job asks for."""
    request = read_request(spec.words)
    return request if spec.recipe_file is None else Request(request.recipe, Path(spec.recipe_file), request.overrides)


def own_words(folder: Path, *, is_resumed: bool) -> list[str]:
    """Return a job's overrides beside those of the command line: where it runs, and what it goes on with."""
    quoted = str(folder.absolute()).replace("\\", "\\\\").replace("'", "\\'")
    return [*([f"resume='{quoted}'"] if is_resumed else []), f"hydra.run.dir='{quoted}'"]
