"""Data objects that several configs of one process describe alike, each built once."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from mlotool.config.reading import leaves
from mlotool.fusion.shared_batches import KeptData, Room


class SharedData:
    """The data objects of the runs of one process, by the nodes that describe them.

    Data of mlotool's own classes are shared: what they draw comes from seeds of their own, and they stay as they were
    built. A user's class may keep something from sample to sample (a counter, a generator, a cache), by which one run
    would change what another one reads; so each run builds its own.

    Example:
        >>> shared = SharedData()
        >>> node = {"_target_": "mlotool.data.Digits", "seed": 0}
        >>> shared.of(node, None, list) is shared.of(dict(node), None, list)
        True
        >>> shared.of(node, None, list) is shared.of({**node, "seed": 1}, None, list)
        False
    """

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}
        # By the identity of what was built.
        self._kept: dict[int, KeptData] = {}
        self._room = Room()

    def of(self, node: Mapping[str, Any], limit: int | None, make: Callable[[], Any]) -> Any:
        """Return the data object of a run.

        Args:
            node: that describes it, resolved, as plain values.
            limit: samples of each split, at most; None: all.
            make: builds it.
        """
        targets = [value for key, value in leaves(node) if key.rpartition(".")[2] == "_target_"]
        if not all(isinstance(each, str) and each.startswith("mlotool.") for each in targets):
            return make()
        key = json.dumps([node, limit])
        if key not in self._built:
            data = self._built[key] = make()
            self._kept[id(data)] = KeptData(data, self._room)
        return self._built[key]

    def evaluated(self, data: Any) -> Any:
        """Return data for the evaluations of one run, the batches of which are kept for the others that share it."""
        kept = self._kept.get(id(data))
        if kept is None:
            return data
        kept.num_readers += 1
        return kept
