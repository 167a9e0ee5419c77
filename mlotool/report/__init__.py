"""Pictures and the pages of runs and sweeps, made from their folders alone; no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlotool.report.run_page import write_report
    from mlotool.report.sweep import SweepRow, sweep_rows
    from mlotool.report.sweep_page import write_sweep_page, write_sweep_summary

__all__ = ["SweepRow", "sweep_rows", "write_report", "write_sweep_page", "write_sweep_summary"]

_HOME_OF = {
    "write_report": "mlotool.report.run_page",
    **dict.fromkeys(("SweepRow", "sweep_rows"), "mlotool.report.sweep"),
    **dict.fromkeys(("write_sweep_page", "write_sweep_summary"), "mlotool.report.sweep_page"),
}


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562): matplotlib takes a second, which a list of runs need not wait for.
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'mlotool.report' has no attribute '{name}'")
