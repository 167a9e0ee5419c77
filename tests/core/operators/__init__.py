"""Operators of losses, as functions of a few tensors, at points where second-order products are known."""

from tests.core.operators.layers import ACTIVATIONS, ATTENTION, LAYERS, NORMS
from tests.core.operators.losses import LOSSES
from tests.core.operators.tensors import TENSORS

OPERATORS = ACTIVATIONS | NORMS | LOSSES | ATTENTION | LAYERS | TENSORS
