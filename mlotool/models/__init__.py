"""Models that recipes use; any other nn.Module does as well."""

from mlotool.models.anchored import Anchored
from mlotool.models.cell_edges import StrongestEdges
from mlotool.models.cell_network import CellNetwork
from mlotool.models.cell_operations import crossed_convolution, operation, pointwise
from mlotool.models.decoder import Decoder
from mlotool.models.expanded_resnet import ExpandedResNet18
from mlotool.models.inverted_residual import InvertedResidual, InvertedResidualNetwork, SqueezeExcitation
from mlotool.models.label_corrector import LabelCorrector
from mlotool.models.mixture_weights import MixtureWeights
from mlotool.models.mlp import MLP, Linear
from mlotool.models.perturbation import BoundedPerturbation
from mlotool.models.positive_vector import PositiveVector
from mlotool.models.pretrained_causal import PretrainedCausalLM
from mlotool.models.pretrained_text import PretrainedText
from mlotool.models.residual_layers import ResidualLayers
from mlotool.models.residual_network import ConvolutionalResidualNetwork, DenseResidualNetwork
from mlotool.models.resnet import ResNet
from mlotool.models.sequence_weigher import SequenceWeigher
from mlotool.models.shared_weight_network import SharedWeightNetwork, SharedWeightUnit
from mlotool.models.text_network import TextAttention, TextConvolution, TextNetwork, TextPooling, TextRecurrence
from mlotool.models.text_transformer import TextTransformer
from mlotool.models.torchvision_model import torchvision_model
from mlotool.models.two_back_network import TwoBackNetwork
from mlotool.models.weights import SampleWeights, WeightNet
from mlotool.models.wide_resnet import WideResNet

__all__ = [
    "MLP",
    "Anchored",
    "BoundedPerturbation",
    "CellNetwork",
    "ConvolutionalResidualNetwork",
    "Decoder",
    "DenseResidualNetwork",
    "ExpandedResNet18",
    "InvertedResidual",
    "InvertedResidualNetwork",
    "LabelCorrector",
    "Linear",
    "MixtureWeights",
    "PositiveVector",
    "PretrainedCausalLM",
    "PretrainedText",
    "ResNet",
    "ResidualLayers",
    "SampleWeights",
    "SequenceWeigher",
    "SharedWeightNetwork",
    "SharedWeightUnit",
    "SqueezeExcitation",
    "StrongestEdges",
    "TextAttention",
    "TextConvolution",
    "TextNetwork",
    "TextPooling",
    "TextRecurrence",
    "TextTransformer",
    "TwoBackNetwork",
    "WeightNet",
    "WideResNet",
    "crossed_convolution",
    "operation",
    "pointwise",
    "torchvision_model",
]
