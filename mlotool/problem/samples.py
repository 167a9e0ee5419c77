"""Samples of a data set, and batches of them; what goes wrong says which sample."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, default_collate

from mlotool.core.arguments import FLAG, Rule, at_least, is_whole, require, require_all
from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown
from mlotool.core.user_code import Call, named, note

_RULES: Mapping[str, Rule] = {
    "batch_size": at_least(1),
    "repeat": at_least(1),
    "num_workers": at_least(0),
    "seed": Rule(is_whole, "a whole number"),
    "shuffle": FLAG,
    "drop_last": FLAG,
}


def read_sample(dataset: Any, index: int) -> Any:
    """Return one sample."""
    try:
        return dataset[index]
    except Exception as error:
        note(error, lambda: Call("data", whole(dataset), {"index": index}, "a sample", "Correct it, or its files."))
        raise


def read_batch(dataset: Any, indices: Any, **seed: int) -> Any:
    """Return the batch of a data set's `__getitems__`, collated; the user's is looked at.

    Args:
        dataset: has `__getitems__`.
        indices: of the samples.
        seed: where the data set asks for one.
    """
    try:
        batch = dataset.__getitems__(indices, **seed)
    except Exception as error:
        note(error, lambda: Call("data", dataset, {"indices": indices}, "a batch", "Correct the data set."))
        raise
    if isinstance(batch, list):
        _check_size(dataset, len(batch), len(indices))
        return collated(dataset, batch)
    if type(dataset).__module__.startswith("mlotool."):
        return batch
    if batch is None:
        raise ConfigError(
            f"data: the __getitems__ of {named(dataset)} returned None for {len(indices)} indices; expected a batch, "
            "or a list of samples. Return one, or remove __getitems__: __getitem__ alone is enough."
        )
    for key in ("input", "target"):
        part = batch.get(key) if isinstance(batch, Mapping) else None
        if isinstance(part, Tensor) and part.dim():
            _check_size(dataset, len(part), len(indices))
    return batch


def _check_size(dataset: Any, size: int, num_indices: int) -> None:
    if size != num_indices:
        raise ConfigError(
            f"data: the __getitems__ of {named(dataset)} returned {size} samples for {num_indices} indices; expected "
            "one for each, in their order. Correct it, or remove it: __getitem__ alone is enough."
        )


def collated(dataset: Any, samples: Sequence[Any]) -> Any:
    """Return samples as one batch."""
    if not samples:
        raise ConfigError(
            f"data: {named(whole(dataset))} gave no samples for a batch, where it had some before; expected a length "
            "that stays. Correct __len__."
        )
    try:
        return default_collate(list(samples))
    except Exception as error:
        note(error, lambda: _collation(dataset, samples))
        raise


def whole(dataset: Any) -> Any:
    """Return the data set that another one gives in another form: a Subset's, for one."""
    inner = getattr(dataset, "dataset", None)
    return dataset if inner is None else whole(inner)


def _collation(dataset: Any, samples: Sequence[Any]) -> Call:
    num_none = sum(each is None for each in samples)
    if num_none:
        return Call(
            "data",
            f"making a batch of {len(samples)} samples of {named(whole(dataset))}, {num_none} of which "
            f"{'are' if num_none > 1 else 'is'} None,",
            expected="a sample at every index",
            advice="Return one wherever __getitem__ ends, or raise an error there that says what is missing.",
        )
    first = _shapes(samples[0])
    other = next((each for each in samples if _shapes(each) != first), None)
    given = {"a sample": samples[0]} if other is None else {"a sample": samples[0], "another one": other}
    advice = (
        "Let the data set return tensors of one size: crop, pad, or transform them (ToTensor makes one of a picture)."
    )
    tensors = [each for sample in samples for each in tree_leaves(sample) if isinstance(each, Tensor)]
    if other is not None and _form(samples[0]) != _form(other):
        advice = "Let __getitem__ return the same keys at each index, each with values of the same kind."
    elif any(each.requires_grad for each in tensors):
        advice = "Return samples without a gradient: .detach()."
    elif any(each.is_sparse for each in tensors):
        advice = "Return dense tensors: .to_dense()."
    return Call(
        "data",
        f"making a batch of {len(samples)} samples of {named(whole(dataset))}",
        given,
        "tensors of one shape, numbers or texts, in dicts or tuples of one form",
        advice,
    )


def _form(sample: Any) -> Any:
    """Return the kinds of what a sample holds, by key."""
    if isinstance(sample, Mapping):
        return {key: _form(each) for key, each in sample.items()}
    if isinstance(sample, list | tuple):
        return [_form(each) for each in sample]
    return type(sample)


def _shapes(value: Any) -> Any:
    """Return what has to be the same of all samples."""
    if isinstance(value, Mapping):
        return {key: _shapes(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shapes(each) for each in value]
    return getattr(value, "shape", type(value))


def check_stream(dataset: Any, **settings: Any) -> None:
    """Refuse arguments of a stream that are of a wrong kind or out of range.

    Args:
        dataset: its data set.
        settings: the other arguments.

    Raises:
        ConfigError: with the first of them.
    """
    advice = "Give one with __len__ and __getitem__, such as torch.utils.data.TensorDataset(inputs, targets)."
    if isinstance(dataset, DataLoader):
        advice = "Give its data set: Stream(loader.dataset, batch_size=32)."
    require(_is_map_style(dataset), "stream.dataset", dataset, "a map-style data set", advice)
    if len(dataset) < 1:
        raise ConfigError(
            f"stream.dataset: found {shown(dataset)} of length 0; expected at least one sample. Correct the sizes of "
            "the data."
        )
    require_all("stream", settings, _RULES)


def is_columns(value: Any) -> bool:
    """Say whether a value holds columns, such as `(inputs, targets)`, in the place of samples.

    Example:
        >>> import torch
        >>> is_columns((torch.zeros(4, 2), torch.zeros(4))), is_columns([torch.zeros(2), torch.zeros(2)])
        (True, False)
    """
    if isinstance(value, Mapping):
        return 0 not in value
    shapes = [tuple(each.shape) for each in value if hasattr(each, "shape")] if type(value) in (list, tuple) else []
    return len(shapes) == len(value) and len(set(shapes)) > 1 if shapes else False


def _is_map_style(value: Any) -> bool:
    if isinstance(value, type | str | bytes | IterableDataset) or (isinstance(value, Tensor) and value.dim() == 0):
        return False
    is_numbered = hasattr(value, "__getitem__") or hasattr(value, "__getitems__")
    return hasattr(value, "__len__") and is_numbered and not is_columns(value)
