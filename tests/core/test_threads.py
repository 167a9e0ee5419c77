"""The command ends, whatever threads the user's code has left."""

import subprocess
import sys

import pytest

SOURCE = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from mlotool.core import process

process.SECONDS_TO_END = 0.5
atexit.register(print, "atexit")
pool = ThreadPoolExecutor(1)
pool.submit(print, "worked").result()
seconds = float(sys.argv[1])
if seconds:
    threading.Thread(target=time.sleep, args=(seconds,), name="beat").start()
print("done", end=" ")
process.end_with_threads(3)
sys.exit(3)
"""


@pytest.mark.parametrize(("seconds", "is_told"), [("0", False), ("0.1", False), ("1000", True)])
def test_threads_are_given_time_and_no_more(seconds: str, is_told: bool) -> None:
    command = [sys.executable, "-c", SOURCE, seconds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "worked\ndone atexit\n")
    told = "warning: all is done, and still running 0.5 s later: the threads 'beat', which mlotool did not start"
    assert (told in done.stderr) is is_told, done.stderr
    assert "pool" not in done.stderr.lower()
