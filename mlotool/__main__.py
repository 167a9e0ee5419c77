"""`python -m mlotool` is `mlotool`."""

import sys

from mlotool.cli.main import main

sys.exit(main())
