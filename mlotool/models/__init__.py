"""Models that recipes use; any other nn.Module does as well."""

from mlotool.models.mlp import MLP, Linear
from mlotool.models.resnet import ResNet
from mlotool.models.torchvision_model import torchvision_model
from mlotool.models.weights import SampleWeights, WeightNet

__all__ = ["MLP", "Linear", "ResNet", "SampleWeights", "WeightNet", "torchvision_model"]
