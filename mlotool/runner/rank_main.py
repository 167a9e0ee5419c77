"""A rank's side of the launcher: run the request, leave the result or the error."""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

from mlotool.config import load_run_config, trust_all
from mlotool.core.errors import Interrupted, MlotoolError
from mlotool.runner.launcher import INTERRUPTED, Launch, watch_parent
from mlotool.runner.run_config import run


def serve(folder: Path) -> int:
    """Run what a parent has requested, as the rank of the environment.

    Args:
        folder: of the launch.

    Returns:
        The exit code; the parent reports the error.
    """
    launch, rank = Launch(folder), int(os.environ["RANK"])
    watch_parent()
    with warnings.catch_warnings():
        if rank:
            # Rank 0 says it.
            warnings.simplefilter("ignore")
        try:
            output_dir, origin, packages, resume = launch.requested()
            # The parent may have found them in the folder of a script, or in a directory that it has left.
            sys.path += [folder for folder in packages.values() if folder is not None and folder not in sys.path]
            trust_all(packages)
            result = run(
                load_run_config(folder, is_own=True),
                output_dir=output_dir,
                origin=origin,
                resume=resume,
                when_created=launch.run_dir.write_text,
            )
        except KeyboardInterrupt as interrupted:
            return interrupted.exit_code if isinstance(interrupted, Interrupted) else INTERRUPTED[0]
        except BaseException as error:
            launch.note_failure(rank, error, traceback.format_exc())
            return error.exit_code if isinstance(error, MlotoolError) else 1
    if rank == 0:
        checkpoint = None if result.checkpoint is None else str(result.checkpoint)
        launch.result.write_text(
            json.dumps({**vars(result), "output_dir": str(result.output_dir), "checkpoint": checkpoint})
        )
    return 0
