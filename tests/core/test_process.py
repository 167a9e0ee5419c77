"""A process that leaves its modules as they are has done all else that Python does at its end."""

import subprocess
import sys
from pathlib import Path

import mlotool

SCRIPT = """
import atexit, sys, threading, time
from mlotool.core.process import import_large, leave

early = open("early.txt", "w")
early.write("written before a large import")
json = import_large("json")
assert import_large("json") is json
atexit.register(lambda: open("atexit.txt", "w").write("called"))
file = open("open.txt", "w")
file.write("written")

def late():
    time.sleep(0.2)
    open("thread.txt", "w").write("ended")

threading.Thread(target=late).start()
print("said")
leave(3)
"""


def test_nothing_is_lost(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(Path(mlotool.__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (3, "said\n", "")
    found = {file.stem: file.read_text() for file in tmp_path.glob("*.txt")}
    expected = {"atexit": "called", "open": "written", "thread": "ended", "early": "written before a large import"}
    assert found == expected
