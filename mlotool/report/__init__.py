"""Pictures and the page of a finished run, read from its folder alone; no torch."""

from importlib import import_module
from typing import Any

_HOME_OF = {
    "SweepRow": "sweep",
    "sweep_rows": "sweep",
    "write_report": "run_page",
    "write_sweep_page": "sweep_page",
    "write_sweep_summary": "sweep_page",
}
__all__ = ["SweepRow", "sweep_rows", "write_report", "write_sweep_page", "write_sweep_summary"]


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562): what reads a sweep needs no matplotlib.
    if name in _HOME_OF:
        return getattr(import_module(f"mlotool.report.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'mlotool.report' has no attribute '{name}'")
