import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlotool.core.errors import ConfigError
from mlotool.data import Vocabulary
from mlotool.data.text_data import LocalTokenizer, split_words


def test_words_are_lower_case_and_signs_are_words() -> None:
    assert split_words("It's GOOD, isn't it?\n Très-bon") == [
        "it's",
        "good",
        ",",
        "isn't",
        "it",
        "?",
        "très",
        "-",
        "bon",
    ]


def test_the_commonest_words_get_ids_in_an_order_of_their_own() -> None:
    vocabulary = Vocabulary.of(["b b a c", "c d"], max_size=5)
    assert vocabulary.words == ("<padding>", "<unknown>", "b", "c", "a")
    assert Vocabulary.of(["c d", "c a b b"], max_size=5).words == vocabulary.words
    assert len(vocabulary) == 5


def test_texts_are_cut_and_padded() -> None:
    vocabulary = Vocabulary(["a", "b"])
    assert vocabulary.encode(["a b a b", "b", "", "B nothing"], 3).tolist() == [
        [2, 3, 2],
        [3, 0, 0],
        [0, 0, 0],
        [3, 1, 0],
    ]


def install_fake(monkeypatch: pytest.MonkeyPatch, padding: int) -> dict[str, Any]:
    """Put a transformers package in place whose tokenizer writes down how it was loaded."""
    seen: dict[str, Any] = {}

    class Tokenizer:
        pad_token_id = padding

        @classmethod
        def from_pretrained(cls, path: str, **settings: Any) -> "Tokenizer":
            if path.endswith("torn"):
                raise OSError("it is torn\nlong advice")
            seen.update(settings)
            return cls()

        def __len__(self) -> int:
            return 30

        def __call__(self, texts: list[str], **settings: Any) -> dict[str, Any]:
            return {"input_ids": [[7] * settings["max_length"] for _ in texts]}

    package = ModuleType("transformers")
    package.AutoTokenizer = Tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", package)
    return seen


def test_a_tokenizer_comes_from_the_disk_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = install_fake(monkeypatch, padding=0)
    tokenizer = LocalTokenizer(str(tmp_path), 30)
    assert seen == {"local_files_only": True, "trust_remote_code": False}
    assert tokenizer.encode(["a", "b"], 3).tolist() == [[7] * 3] * 2
    (tmp_path / "torn").mkdir()
    for name, size, words in (
        ("absent", 30, r"no tokenizer could be read \(there is no such folder\); expected a folder"),
        ("torn", 30, r"no tokenizer could be read \(it is torn\); expected a folder"),
        ("", 29, r"data\.vocabulary_size=29; expected at least 30, the tokens of data\.tokenizer="),
    ):
        with pytest.raises(ConfigError, match=words):
            LocalTokenizer(str(tmp_path / name), size)
    install_fake(monkeypatch, padding=1)
    with pytest.raises(ConfigError, match="its padding has the id 1; expected 0"):
        LocalTokenizer(str(tmp_path), 30)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"not installed; expected it.*pip install 'mlotool\[text\]'"):
        LocalTokenizer(str(tmp_path), 30)
