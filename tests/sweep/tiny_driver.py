"""The command line with jobs that train nothing: `python -m tests.sweep.tiny_driver run -m ...`."""

import sys

from mlotool.cli.main import main
from mlotool.sweep import process

if __name__ == "__main__":
    process.MODULE = "tests.sweep.tiny_job"
    sys.exit(main(sys.argv[1:]))
