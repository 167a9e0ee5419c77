"""nodes.json of run folders, as runs would have left them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Node = dict[str, Any]


def node(name: str, *inputs: str, kind: str = "Linear", mutator: str | None = None) -> Node:
    return {"id": name, "kind": kind, "inputs": list(inputs), "shape": [16, 8, 8], "mutator": mutator}


def residual(num_blocks: int, changed: Sequence[int] = ()) -> list[Node]:
    """Return a network of residual blocks, of which some have another convolution."""
    nodes = [node("images", kind="placeholder"), node("stem", "images", kind="Conv2d")]
    for number in range(num_blocks):
        before, name = nodes[-1]["id"], f"blocks.{number}"
        mutator = "kernel" if number in changed else None
        nodes += [
            node(f"{name}.convolution", before, kind="Conv2d", mutator=mutator),
            node(f"{name}.norm", f"{name}.convolution", kind="BatchNorm2d"),
            node(f"{name}:add", f"{name}.norm", before, kind="add"),
            node(f"{name}:relu", f"{name}:add", kind="relu"),
        ]
    return [*nodes, node("output", nodes[-1]["id"], kind="output")]


def cells(num_cells: int) -> list[Node]:
    """Return cells that read the two before, each of three pairs of changed nodes."""
    nodes = [node("images", kind="placeholder"), node("stem", "images")]
    before, last = "stem", "stem"
    for number in range(num_cells):
        name, parts = f"cell_{number}", []
        for pair, source in enumerate((before, last, last)):
            parts.append(f"{name}_{pair}_add")
            nodes += [node(f"{name}_{pair}_{side}", source, mutator="cell") for side in ("left", "right")]
            nodes.append(node(parts[-1], f"{name}_{pair}_left", f"{name}_{pair}_right", mutator="cell"))
        nodes.append(node(name, *parts, kind="cat", mutator="cell"))
        before, last = last, name
    return [*nodes, node("output", last, kind="output")]


def write_nodes(folder: Path, nodes: Sequence[Any], decisions: Mapping[str, str] | None = None, **record: Any) -> Path:
    """Write nodes.json of one problem."""
    made = [
        {"name": name, "value": value, "candidates": ["k3", "k5"], "num_candidates": 2}
        for name, value in (decisions or {}).items()
    ]
    content = {"num_parameters": 19074, "num_nodes": len(nodes), "nodes": list(nodes), "decisions": made, **record}
    (folder / "nodes.json").write_text(json.dumps({"problems": {"classifier": content}}))
    return folder
