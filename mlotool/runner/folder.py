"""The run folder: where each file of a run lies, and those that are written once."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from mlotool.config import Origin, write_provenance
from mlotool.core.errors import ConfigError
from mlotool.program import Graph


@dataclass(frozen=True)
class RunFolder:
    """The files of a run.

    Args:
        path: the folder.
    """

    path: Path

    @property
    def metrics(self) -> Path:
        """`tick,key,value`."""
        return self.path / "metrics.csv"

    @property
    def artifacts(self) -> Path:
        """The folder of arrays for the report."""
        return self.path / "artifacts"

    @property
    def checkpoints(self) -> Path:
        """The folder of `best.ckpt` and `last.ckpt`."""
        return self.path / "checkpoints"

    @classmethod
    def create(cls, config: Any, output_dir: Path | None) -> "RunFolder":
        """Make the folder: `output_dir`, or a new `outputs/<name>/<date>_<time>`."""
        path = new_output_dir(config.name) if output_dir is None else Path(output_dir)
        if (path / "metrics.csv").exists():
            raise ConfigError(
                f"{path} holds a run already; expected a new or empty folder. Name another one, or remove it."
            )
        for folder in (path, path / "artifacts", path / "checkpoints"):
            folder.mkdir(parents=True, exist_ok=True)
        return cls(path)

    def checkpoint(self, which: str) -> Path:
        """Return where the checkpoint `which` ("best" or "last") lies."""
        return self.checkpoints / f"{which}.ckpt"

    def find_checkpoint(self, which: str) -> Path:
        """Return the checkpoint `which`; a run without one is a ConfigError."""
        path = self.checkpoint(which)
        if not path.is_file():
            present = sorted(each.stem for each in self.checkpoints.glob("*.ckpt"))
            raise ConfigError(
                f"{self.path} has no checkpoint '{which}'; expected {path}. "
                + (f"Use checkpoint={present[0]}." if present else "Run the recipe with runner.checkpoint=true.")
            )
        return path

    def write_inputs(self, config: Any, origin: Origin | None, graph: Graph) -> None:
        """Write everything that is known before the first tick."""
        (self.path / "config.yaml").write_text(yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))
        overrides = () if origin is None else origin.overrides
        (self.path / "overrides.txt").write_text("".join(f"{line}\n" for line in overrides))
        (self.path / "graph.mmd").write_text(graph.mermaid())
        if origin is not None and origin.recipe_path is not None:
            shutil.copyfile(origin.recipe_path, self.path / "recipe.yaml")
        write_provenance(self.path, config, origin or Origin("mlotool.run", (), None))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json; NaN and infinity become null, which JSON has and they are not."""
        text = json.dumps(_json(summary), indent=2, allow_nan=False)
        (self.path / "summary.json").write_text(text + "\n")


def new_output_dir(name: str) -> Path:
    """Return a path `outputs/<name>/<date>_<time>` that does not exist yet."""
    parent = Path("outputs") / name
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    candidates = (parent / (stamp if count == 0 else f"{stamp}_{count}") for count in range(1_000_000))
    return next(path for path in candidates if not path.exists())


def plain(node: Any) -> Any:
    """Return a config as dicts, lists and scalars, with every interpolation resolved."""
    if isinstance(node, Mapping):
        return {key: plain(node[key]) for key in node}
    if isinstance(node, Sequence) and not isinstance(node, str):
        return [plain(value) for value in node]
    return node


def _json(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {str(key): _json(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_json(value) for value in node]
    if isinstance(node, float) and (node != node or node in (float("inf"), float("-inf"))):
        return None
    return node
