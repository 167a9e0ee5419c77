"""How the benchmarks measure: interleaved rounds, live tensor memory, and a record of where it was run."""
