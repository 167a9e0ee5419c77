"""The page of what has second-order products is what is measured."""

from pathlib import Path

import pytest
import torch

from tests.core.operators.page import page

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "forward_mode.md"


@pytest.mark.slow
def test_the_page_is_what_is_measured():
    version = torch.__version__.partition("+")[0]
    text = PAGE.read_text()
    if f"Measured with torch {version} " not in text:
        pytest.skip("the page was measured with another version of torch")
    write = "python -m tests.core.operators.page > docs/internals/forward_mode.md"
    assert page() == text, f"write it anew: {write}"
