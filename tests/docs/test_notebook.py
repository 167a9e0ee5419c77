"""The notebook runs, and prints what is kept in it."""

import nbformat
import pytest

from docs.generated.notebook import NOTEBOOK, executed, page, printed


@pytest.mark.slow
# A kernel speaks over sockets of this machine.
@pytest.mark.filterwarnings("ignore")
def test_it_prints_what_it_shows() -> None:
    assert printed(executed()) == printed(nbformat.read(NOTEBOOK, as_version=4))


def test_each_picture_of_its_page_is_there() -> None:
    text, pictures = page()
    assert len(pictures) == 3
    assert all(f"](notebook/{address.rpartition('/')[2]})" in text for address in pictures)
