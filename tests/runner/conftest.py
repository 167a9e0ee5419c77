from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlotool.runner
from mlotool.runner import RunResult, loading, run_config
from tests.runner.tiny import make_built, make_config


@pytest.fixture
def tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunResult]:
    """Run the tiny program: `tiny_run({"runner.max_ticks": 5}, scheduler=...)`; the run folder is tmp_path/run."""

    def run(changes: dict[str, Any] | None = None, *, folder: str = "run", **settings: Any) -> RunResult:
        analyses, watch, resume = (settings.pop(key, None) for key in ("analyses", "watch", "resume"))
        callbacks, loggers = (settings.pop(key, ()) for key in ("callbacks", "loggers"))

        def build(config: Any, reduce: Any = None, shared: Any = None) -> Any:
            built = make_built(**settings)
            built.analyses.update(analyses or {})
            built.callbacks += callbacks
            built.loggers += loggers
            return built

        monkeypatch.setattr(run_config, "build", build)
        monkeypatch.setattr(loading, "build", build)
        return mlotool.runner.run(
            make_config(**(changes or {})), output_dir=tmp_path / folder, watch=watch, resume=resume
        )

    return run
