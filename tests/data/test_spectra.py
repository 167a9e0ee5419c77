"""Spectra: made-up ones, and Indian Pines on a tiny image in the published format."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from mlotool.core.errors import ConfigError
from mlotool.data import IndianPines, SyntheticSpectra

SIZES = {"train": 32, "val": 16, "test": 32}


def _write(folder: Path, num_bands: int = 220, corrected: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Write 10 x 12 pixels, 96 with a label, and return image and labels."""
    generator = np.random.default_rng(0)
    labels = np.zeros(120, dtype=np.uint8)
    labels[:96] = np.arange(96) % 16 + 1
    labels = generator.permutation(labels).reshape(10, 12)
    image = generator.integers(955, 9605, (10, 12, num_bands), dtype=np.uint16)
    image[:, :, 7] = 1000  # a band that says nothing
    suffix = "_corrected" if corrected else ""
    savemat(folder / f"Indian_pines{suffix}.mat", {f"indian_pines{suffix}": image}, do_compression=True)
    savemat(folder / "Indian_pines_gt.mat", {"indian_pines_gt": labels}, do_compression=True)
    return image, labels


@pytest.mark.parametrize("num_bands", [220, 200])
def test_indian_pines_are_the_labelled_pixels(tmp_path: Path, num_bands: int) -> None:
    _write(tmp_path, num_bands, corrected=num_bands == 200)
    data = IndianPines(str(tmp_path), SIZES, image_shape=[num_bands])
    assert {name: len(data.split(name)) for name in data.splits} == SIZES
    train = data.split("train").__getitems__(range(32))
    assert torch.bincount(train["target"]).tolist() == [2] * 16
    inputs = train["input"].double()
    assert inputs[:, 7].abs().max() == 0
    others = torch.arange(num_bands) != 7
    torch.testing.assert_close(inputs.mean(dim=0), torch.zeros(num_bands).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs[:, others].std(dim=0, correction=0), torch.ones(num_bands - 1).double())


def test_pixels_keep_their_labels(tmp_path: Path) -> None:
    image, labels = _write(tmp_path)
    data = IndianPines(str(tmp_path), {"train": 96})
    batch = data.split("train").__getitems__(range(96))
    # All labelled pixels are there: sorted by their first band they are those of the file.
    pixels, kinds = image[labels > 0].astype(float), labels[labels > 0] - 1
    expected = (pixels[:, 0] - pixels[:, 0].mean()) / pixels[:, 0].std()
    order, found = np.argsort(expected), batch["input"][:, 0].argsort()
    np.testing.assert_allclose(batch["input"][found, 0], expected[order], atol=1e-5)
    assert batch["target"][found].tolist() == kinds[order].tolist()


def test_the_file_with_the_bands_that_are_asked_for_is_read(tmp_path: Path) -> None:
    _write(tmp_path)
    _write(tmp_path, 200, corrected=True)
    for num_bands in (220, 200):
        data = IndianPines(str(tmp_path), {"train": 96}, image_shape=[num_bands])
        assert data.split("train")[0]["input"].shape == (num_bands,)
    with pytest.raises(ConfigError, match=r"data\.image_shape=\[210\]; expected \[220\]"):
        IndianPines(str(tmp_path), {"train": 96}, image_shape=[210])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"indian_pines": np.array([[{"a": 1}, "os.system"]], dtype=object)}, "holds indian_pines: cell"),
        ({"a": np.zeros((2, 2, 3)), "b": np.zeros((2, 2, 3))}, "expected one array of numbers"),
        ({"indian_pines": np.zeros((2, 3))}, "expected one array of numbers with 3 axes"),
        ({"indian_pines": np.zeros((2, 2, 3), dtype=complex)}, "expected one array of numbers"),
        ({}, "holds nothing"),
    ],
)
def test_files_that_hold_something_else_are_refused(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    _write(tmp_path)
    savemat(tmp_path / "Indian_pines.mat", content)
    with pytest.raises(ConfigError, match=message):
        IndianPines(str(tmp_path), SIZES)


@pytest.mark.parametrize("content", [b"", b"no .mat file", b"MATLAB 5.0 MAT-file" + bytes(200)])
def test_broken_files_are_refused(tmp_path: Path, content: bytes) -> None:
    _write(tmp_path)
    (tmp_path / "Indian_pines_gt.mat").write_bytes(content)
    with pytest.raises(ConfigError, match=r"Indian_pines_gt\.mat (could not be read|holds nothing)"):
        IndianPines(str(tmp_path), SIZES)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "touched",)

    _write(tmp_path)
    (tmp_path / "Indian_pines.mat").write_bytes(pickle.dumps(Touch()))
    with pytest.raises(ConfigError, match="could not be read"):
        IndianPines(str(tmp_path), SIZES)
    assert not (tmp_path / "touched").exists()


def test_missing_and_misfitting_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither Indian_pines\.mat nor Indian_pines_corrected\.mat"):
        IndianPines(str(tmp_path), SIZES)
    _write(tmp_path)
    savemat(tmp_path / "Indian_pines_gt.mat", {"indian_pines_gt": np.ones((3, 3), dtype=np.uint8)})
    with pytest.raises(ConfigError, match=r"the image has \(10, 12\) pixels"):
        IndianPines(str(tmp_path), SIZES)


def test_synthetic_spectra_are_smooth_and_standardised() -> None:
    data = SyntheticSpectra({"train": 320, "val": 64})
    train = data.split("train").__getitems__(range(320))
    assert (data.num_classes, data.image_shape, train["input"].dtype) == (16, (220,), torch.float32)
    assert torch.bincount(train["target"]).tolist() == [20] * 16
    torch.testing.assert_close(train["input"].mean(dim=0), torch.zeros(220), atol=1e-5, rtol=0)
    assert train["input"].diff(dim=1).abs().mean() < 0.5 * train["input"].abs().mean()


def test_noise_decides_how_hard_the_classes_are() -> None:
    accuracy = []
    for noise in (0.02, 0.5):
        data = SyntheticSpectra({"train": 640, "test": 320}, image_shape=[40], noise=noise)
        train, test = (data.split(name).values for name in ("train", "test"))
        model = LinearDiscriminantAnalysis().fit(train["input"].numpy(), train["target"].numpy())
        accuracy.append(model.score(test["input"].numpy(), test["target"].numpy()))
    assert accuracy[0] > 0.95 > 0.6 > accuracy[1] > 2 / 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": {"train": 10}}, "adds up to 10 pixels; expected at least 16"),
        ({"sizes": {"trian": 100}}, "Did you mean 'train'"),
        ({"sizes": {"train": 100}, "image_shape": [2, 2]}, r"image_shape=\[2, 2\]; expected \[d\]"),
    ],
)
def test_spectra_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyntheticSpectra(**options)
