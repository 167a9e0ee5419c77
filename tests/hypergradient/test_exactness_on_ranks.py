"""Two ranks with unequal parts of their batches, against one graph of all steps on the joined batches."""

from pathlib import Path

import torch

from tests.hypergradient.exactness_on_ranks import CASES, main
from tests.hypergradient.test_exactness import assert_exact
from tests.runner.processes import run_ranks


def test_two_ranks_find_what_one_graph_does(tmp_path: Path) -> None:
    _, (first, second) = run_ranks(main, 2, tmp_path, meanwhile=lambda: None)
    for name, case in CASES.items():
        found = {key: each for key, each in first.items() if key.startswith(f"{name} ")}
        assert len(found) == (4 if name == "weighting" else 2)
        assert_exact(case, list(found.values()))
        assert all(torch.equal(each, second[key]) for key, each in found.items())
