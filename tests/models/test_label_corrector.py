import pytest
import torch

from mlotool.core.errors import ConfigError
from mlotool.models import MLP, LabelCorrector, ResNet


def test_corrected_labels_are_distributions_between_given_and_predicted() -> None:
    torch.manual_seed(0)
    corrector = LabelCorrector(4, 3)
    features, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    corrected, trust = corrector(features, target), corrector.trust(features, target)[:, None]
    torch.testing.assert_close(corrected.sum(dim=1), torch.ones(5))
    predicted = corrector.predict(features).softmax(dim=1)
    torch.testing.assert_close(corrected, trust * torch.eye(3)[target] + (1 - trust) * predicted)


def test_trust_starts_where_it_is_told() -> None:
    corrector = LabelCorrector(4, 3, initial_trust=0.9)
    torch.nn.init.zeros_(corrector.trust_output.weight)
    trust = corrector.trust(torch.randn(2, 4), torch.tensor([0, 1]))
    torch.testing.assert_close(trust, torch.full((2,), 0.9))
    with pytest.raises(ConfigError, match="initial_trust=1"):
        LabelCorrector(4, 3, initial_trust=1)


@pytest.mark.parametrize(
    ("model", "width"), [(MLP([3, 8, 8], 10, [16, 12]), 12), (ResNet(8, 10, [3, 8, 8], width=4), 16)]
)
def test_features_are_what_the_last_layer_reads(model: torch.nn.Module, width: int) -> None:
    images = torch.randn(4, 3, 8, 8)
    features, logits = model.eval().features_and_logits(images)
    assert features.shape == (4, width)
    torch.testing.assert_close(logits, model(images))
