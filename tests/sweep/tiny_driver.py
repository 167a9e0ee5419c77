"""The command line with jobs that train nothing: `python -m tests.sweep.tiny_driver run -m ...`."""

import signal
import sys

from mlotool.cli.main import main
from mlotool.sweep import driver

if __name__ == "__main__":
    # A shell gives what it runs in the background a SIGINT that is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    driver.MODULE = "tests.sweep.tiny_job"
    sys.exit(main(sys.argv[1:]))
