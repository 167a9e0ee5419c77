"""Names on the Hugging Face Hub: refused unless the user allows them, fixed at a commit where they are."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mlotool
from mlotool.config import compose
from mlotool.config.composition import with_values
from mlotool.config.provenance import Origin, write_provenance
from mlotool.core.errors import ConfigError
from mlotool.folders import hub
from mlotool.folders.run_folder import RunFolder
from tests.cli.conftest import call, hydra_composes_once, jobs_are_forked

__all__ = ["call", "hydra_composes_once", "jobs_are_forked"]
COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
WORDS = ["model@problems.model.module=pretrained_causal", "problems.model.module.pretrained=tiny/gpt2"]


@pytest.fixture(autouse=True)
def nobody_has_allowed_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Set first, so that what a test sets is undone.
    monkeypatch.setenv("MLOTOOL_ALLOW_HUB", "0")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The Hub in a folder: which functions were asked, with what."""
    found: list[Any] = []
    snapshot = tmp_path / "cache" / COMMIT

    def hf_hub_download(repository: str, **options: Any) -> str:
        found.append(("hf_hub_download", repository, options))
        if repository == "absent":
            raise OSError("404\nand much more")
        return str(snapshot / options["filename"])

    def snapshot_download(repository: str, **options: Any) -> str:
        found.append(("snapshot_download", repository, options))
        return str(snapshot)

    package = ModuleType("huggingface_hub")
    package.hf_hub_download, package.snapshot_download = hf_hub_download, snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", package)
    return found


@pytest.mark.parametrize(
    "source", ["../gpt2", "a/b/c", "gpt2@", "http://x/y", "~/gpt2", "a..b", "gpt2@x/y", ".git", ""]
)
def test_what_is_no_name(source: str) -> None:
    assert not hub.is_name(source)


def test_nothing_is_fetched_unasked(asked: list[Any], call: Any) -> None:
    with pytest.raises(ConfigError, match=r"pretrained: found 'tiny/gpt2', which is not a folder; .*allow_hub=True"):
        hub.folder_of("pretrained", "tiny/gpt2")
    compose("lm_plain", WORDS)
    code, _, err = call("run", "lm_plain", *WORDS)
    assert code == 2, err
    assert "--allow-hub on the command line" in err
    assert asked == []


def test_a_name_is_fixed_at_its_commit(asked: list[Any], call: Any, tmp_path: Path) -> None:
    code, out, err = call("show", "lm_plain", *WORDS, "--allow-hub")
    assert code == 0, err
    assert f"pretrained: tiny/gpt2@{COMMIT}" in " ".join(out.split())
    config = compose("lm_plain", WORDS)  # the flag holds for the process
    assert config.problems.model.module.pretrained == f"tiny/gpt2@{COMMIT}"
    assert asked == [("hf_hub_download", "tiny/gpt2", {"revision": None, "filename": "config.json"})] * 2
    assert with_values(config, ["problems.model.module.pretrained=other"]) is None

    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    write_provenance(folder, config, Origin("", (), None))
    assert json.loads((folder.path / "provenance.json").read_text())["hub"] == [f"tiny/gpt2@{COMMIT}"]

    asked.clear()
    assert hub.folder_of("pretrained", config.problems.model.module.pretrained).name == COMMIT
    [(function, repository, options)] = asked
    assert (function, repository, options["revision"]) == ("snapshot_download", "tiny/gpt2", COMMIT)
    assert not any(pattern.endswith((".py", ".bin", ".pt", ".pkl", "*")) for pattern in options["allow_patterns"])


def test_what_the_hub_does_not_give_is_told(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    words = [WORDS[0], "problems.model.module.pretrained=absent"]
    with pytest.raises(ConfigError, match=r"problems\.model\.module\.pretrained: found 'absent', .* \(404\); expected"):
        mlotool.compose("lm_plain", words, allow_hub=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"needs huggingface_hub, which is not installed"):
        mlotool.compose("lm_plain", words)


def test_a_folder_needs_no_hub(asked: list[Any], tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    assert hub.folder_of("pretrained", "gpt2") == Path("gpt2")
    assert compose("lm_plain", [WORDS[0], "problems.model.module.pretrained=gpt2"], allow_hub=True)
    assert asked == []
