"""What to do about an exception of the user's code, by the words of torch and Python. No torch."""

from collections.abc import Mapping
from typing import Any

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "size calculation overflowed")
MORE_MEMORY = "Expected room for it in the memory: lower batch sizes, data.sizes or the model, or end other programs."
NO_EXIT = "Expected that the code there returns; nothing has finished. Raise an error there that says why."
_ADVICE = {
    "shapes cannot be multiplied": (
        "The layer takes the first number of the second shape: set it to the last one of the first shape."
    ),
    "modified by an inplace operation": (
        "Write x = x + y in place of x.add_(y) or x += y, in the loss and in the modules."
    ),
    "backward through the graph a second time": (
        "A loss returns a tensor and leaves backward() to mlotool: remove the call, and give torch.autograd.grad "
        "create_graph=True. What a loss or a module keeps for its next call it keeps as .detach()."
    ),
    "torch.utils.checkpoint: ": (
        "mlotool evaluates blocks again by itself: leave checkpoint(block, x) out, and name the blocks in remat."
    ),
    "has no attribute 'losses'": (
        "A loss with chunk asks its module for losses(tokens, targets, chunk), as mlotool.models.Decoder has it: write "
        "this method, or set chunk to null."
    ),
    "class probabilities": "Classes are numbers, not one column each: give the targets as .argmax(1), of torch.long.",
    "must have the same dtype": "Give the module and the data one dtype: .float() on both.",
    "not implemented for 'Long'": "Whole numbers stand where floating-point ones should: look at the arguments' order.",
    "more than 1 value per channel": "BatchNorm needs two samples: raise batch_size, or normalize otherwise.",
    "remove_duplicate": "A role takes other parameters by role.at(parameters)(x), in place of functional_call.",
    "sparse gradients": "Write sparse=False where the module makes its Embedding, or choose torch.optim.SparseAdam.",
    "NVIDIA driver": "Leave devices to mlotool, which moves modules and batches (runner.accelerator): remove the call.",
    "not compiled with CUDA": "Leave devices to mlotool (runner.accelerator): remove the call.",
    "on the expected device": "Leave devices to mlotool: make tensors where others are, as in torch.zeros_like(x).",
    "on the same device": "Leave devices to mlotool: make tensors where others are, as in torch.zeros_like(x).",
}
"""What to do, by words of an error of torch's; the first that fits counts."""


def advice_for(error: BaseException, given: Mapping[str, Any]) -> str:
    """Return what to do about an exception; "" where nothing is known but that it was raised.

    Args:
        error: that code of the user's has raised.
        given: what that code was called with, by name.
    """
    text = str(error)
    if is_out_of_memory(error):
        return MORE_MEMORY
    if isinstance(error, SystemExit):
        return NO_EXIT
    for words, advice in _ADVICE.items():
        if words in text:
            return advice
    # An empty one is raised by the methods of base classes.
    if isinstance(error, NotImplementedError) and (not text or "missing the required" in text):
        return "Write the method that is missing."
    if "out of bounds" in text and "Target" in text:
        return "A target counts from 0: let the module give one output for each class."
    if "target" in text and ("dtype" in text or "Float" in text):
        return "Classes are whole numbers: give the targets as torch.long."
    return _batch_advice(error, given.get("batch"))


def _batch_advice(error: BaseException, batch: Any) -> str:
    """Return what to do where code has taken a batch for one of another form."""
    text = str(error)
    if isinstance(batch, list | tuple) or (hasattr(batch, "shape") and isinstance(error, IndexError)):
        return (
            "Let the data set return dicts {input, target, ...}. (In a recipe pairs (input, target) become such; from "
            "Python a batch is what the data set's samples are.)"
        )
    is_unpacked = "values to unpack" in text or "'dict' object" in text or "'str' object" in text
    is_numbered = isinstance(error, KeyError) and error.args and isinstance(error.args[0], int)
    if isinstance(batch, Mapping) and batch and (is_unpacked or is_numbered):
        keys = " and ".join(f"batch[{key!r}]" for key in list(batch)[:2])
        return f"A batch is a dict: take {keys}. Where something else is taken apart, correct that."
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an exception means that there is no memory left, on the CPU or on a GPU."""
    # torch raises a RuntimeError with its allocator's words.
    return isinstance(error, MemoryError) or any(each in str(error) for each in _OUT_OF_MEMORY)
