"""Running statistics of a shared space that are each path's own."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mlotool.core.errors import ConfigError
from mlotool.spaces.decisions import Value
from mlotool.spaces.shared.path_table import Path, SharedDecision, path_of

MAX_PATHS = 256
"""Of a space whose paths have statistics of their own, at most."""

MARK = "path_"
"""Begins the name of a buffer that has a row for each path."""

NAMES = ("running_mean", "running_var", "num_batches_tracked")


class PathStatistics:
    """Puts a path's running statistics into the places of the layers', for a call.

    Beside a layer's own buffers there are such of shape (paths, ..); a call moves the row of its path. A mixture is no
    path: it has the layers' own buffers, which only mixtures move.

    Args:
        root: the space, with all layers that keep running statistics.
        decisions: of the space.

    Raises:
        ConfigError: it has more than `MAX_PATHS` paths.

    Cost: the memory of the statistics of each layer, once for each path.
    """

    def __init__(self, root: nn.Module, decisions: Sequence[SharedDecision]) -> None:
        self._decisions = tuple(decisions)
        paths = [_key(each) for each in paths_of(decisions)]
        self._rows = {key: number for number, key in enumerate(paths)}
        for layer in layers_of(root):
            for name in NAMES:
                own = layer._buffers[name]
                if own is not None:
                    layer.register_buffer(MARK + name, own.expand(len(paths), *own.shape).clone())

    def row(self, path: Mapping[str, object]) -> int:
        """Return the number of a path."""
        return self._rows[_key(path_of(self._decisions, lambda each: path[each.name]))]  # type: ignore[arg-type,return-value]

    @contextmanager
    def of(self, root: nn.Module, path: Mapping[str, object]) -> Iterator[None]:
        """Let the layers have the statistics of a path, which their calls move."""
        row = self.row(path)
        # What is in a buffer's place now: an evaluation may have put a copy there.
        holders = [each._buffers for each in layers_of(root)]
        own = [{name: holder[name] for name in NAMES} for holder in holders]
        try:
            for holder in holders:
                for name in NAMES:
                    rows = holder.get(MARK + name)
                    if rows is not None:
                        holder[name] = rows[row]
            yield
        finally:
            for holder, before in zip(holders, own, strict=True):
                holder.update(before)

    def state(self, state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
        """Return a state with the statistics of one path, under the names that a layer of one model has."""
        row, found = self.row(path), dict(state)
        for name, rows in state.items():
            above, _, last = name.rpartition(".")
            if last.startswith(MARK) and last.removeprefix(MARK) in NAMES:
                del found[name]
                found[f"{above}.{last.removeprefix(MARK)}" if above else last.removeprefix(MARK)] = rows[row]
        return found


def layers_of(root: nn.Module) -> list[_NormBase]:
    """Return the layers that keep running statistics, as BatchNorm does."""
    return [each for each in root.modules() if isinstance(each, _NormBase) and each.running_mean is not None]


def paths_of(decisions: Sequence[SharedDecision]) -> list[dict[str, Value]]:
    """Return all paths.

    Raises:
        ConfigError: there are more than `MAX_PATHS`.

    Example:
        >>> paths_of([SharedDecision("kernel", ("k3", "k5"))])
        [{'kernel': 'k3'}, {'kernel': 'k5'}]
    """
    found: list[dict[str, Value]] = [{}]
    for each in decisions:
        longer = []
        for path in found:
            is_asked = each.is_asked(path)
            longer += [{**path, each.name: value} for value in each.candidates] if is_asked else [path]
        found = longer
        if len(found) > MAX_PATHS:
            raise ConfigError(
                f"statistics: found path in a space of more than {MAX_PATHS} paths; expected at most {MAX_PATHS}, as "
                "each has running statistics of its own. Write statistics: shared, and take statistics anew before an "
                "evaluation: evaluate.recalibrate."
            )
    return found


def _key(path: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    return tuple(path.items())
