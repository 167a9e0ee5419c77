"""Pictures and the pages of runs and sweeps, made from their folders alone; no torch."""

from mlotool.report.run_page import write_report
from mlotool.report.sweep import SweepRow, sweep_rows
from mlotool.report.sweep_page import write_sweep_page, write_sweep_summary

__all__ = ["SweepRow", "sweep_rows", "write_report", "write_sweep_page", "write_sweep_summary"]
