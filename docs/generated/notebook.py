"""The notebook among the tutorials: `python -m docs.generated.notebook` runs it and keeps what it prints and draws."""

from pathlib import Path
from typing import Any

import nbclient
import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"
ADDRESS = "tutorials/notebook"


def page() -> tuple[str, dict[str, bytes]]:
    """Return the notebook as Markdown, and its pictures by their address in the site."""
    text, resources = MarkdownExporter().from_filename(str(NOTEBOOK))
    pictures: dict[str, bytes] = resources["outputs"]
    for name in pictures:
        text = text.replace(f"]({name})", f"](notebook/{name})")
    return text, {f"{ADDRESS}/{name}": picture for name, picture in pictures.items()}


def executed() -> Any:
    """Return the notebook as it is after its cells have run in a kernel of their own, from first to last."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, record_timing=False).execute()
    return notebook


def printed(notebook: Any) -> list[str]:
    """Return what each code cell has printed; a kernel may send it in several parts.

    Args:
        notebook: as nbformat reads it.
    """
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")
        for cell in cells
    ]


def write() -> None:
    """Run the notebook, and write it with what its cells have printed and drawn."""
    notebook = executed()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            parts = [output for output in cell.outputs if output.output_type == "stream"]
            others = [output for output in cell.outputs if output.output_type != "stream"]
            text = "".join(part.text for part in parts)
            cell.outputs = [*([nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []), *others]
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    write()
