"""Everything that only a GPU can show, in one command: `python -m benchmarks.gpu --minutes 8 --out DIR`."""
