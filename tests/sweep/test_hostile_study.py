"""A study in the folder of a sweep that is gone on with, which a stranger has made."""

import os
import pickle
import sqlite3
import struct
from pathlib import Path
from typing import Any

import pytest

from mlotool.config.sweep_plan import Dimension
from mlotool.core.errors import ConfigError, MlotoolError
from mlotool.sweep.study import StudyPoints
from tests.sweep.plans import RATE, take_up

optuna = pytest.importorskip("optuna")
SOLVER = Dimension("hypergradient", ("cg", "neumann"))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The database of a study with two trials that have not ended."""
    folder = tmp_path_factory.mktemp("begun") / "sweep"
    folder.mkdir()
    points = _take_up(folder)
    assert points.next() is not None
    assert points.next() is not None
    return (folder / "study.db").read_bytes()


def _spoiled(begun: bytes, tmp_path: Path, *statements: str) -> Path:
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "study.db").write_bytes(begun)
    with sqlite3.connect(folder / "study.db") as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return folder


def _take_up(folder: Path, **settings: Any) -> StudyPoints:
    return take_up(folder, RATE, SOLVER, num_trials=4, **settings)


def test_an_honest_one_is_taken_up(begun: bytes, tmp_path: Path) -> None:
    group = _take_up(_spoiled(begun, tmp_path)).next()
    assert group is not None and group.points[0].words[1].startswith("hypergradient=")


CHOICES = '{"name": "CategoricalDistribution", "attributes": {"choices": ["${oc.env:HOME}", "{_target_: os.system}"]}}'
SPOILED = {
    "words of a command line": (f"UPDATE trial_params SET distribution_json = '{CHOICES}', param_value = 0",),
    "a value out of range": ("UPDATE trial_params SET param_value = 1e9",),
    "no number": ("UPDATE trial_params SET param_value = 'x'",),
    "no JSON": ("UPDATE trial_params SET distribution_json = '[[['",),
    "another distribution": ('UPDATE trial_params SET distribution_json = \'{"name": "os.system"}\'',),
    "other columns": ("ALTER TABLE trials RENAME COLUMN number TO other",),
    "a trial of no number": ("UPDATE trials SET number = '../../x'",),
    "a state": ("UPDATE trials SET state = 'x'",),
}


@pytest.mark.parametrize("statements", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_one_is_refused(begun: bytes, tmp_path: Path, statements: tuple[str, ...]) -> None:
    with pytest.raises(MlotoolError, match=r"expected .*resume out for a new sweep"):
        _take_up(_spoiled(begun, tmp_path, *statements))


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"x" * 10_000)
    with pytest.raises(MlotoolError, match=r"does not open|resume out for a new sweep"):
        _take_up(tmp_path)


@pytest.mark.parametrize("suffix", ["", "-journal", "-wal"])
def test_a_database_that_leads_elsewhere_is_refused(begun: bytes, tmp_path: Path, suffix: str) -> None:
    folder = _spoiled(begun, tmp_path)
    (tmp_path / "other.db").write_bytes(begun)
    (folder / f"study.db{suffix}").unlink(missing_ok=True)
    (folder / f"study.db{suffix}").symlink_to(tmp_path / "other.db")
    with pytest.raises(MlotoolError, match="a link that leads out"):
        _take_up(folder)
    assert (tmp_path / "other.db").read_bytes() == begun


def test_a_journal_removes_no_other_file(begun: bytes, tmp_path: Path) -> None:
    """SQLite removes the file that the journal of a crash names, once it has rolled back."""
    folder, victim = _spoiled(begun, tmp_path), tmp_path / "precious.txt"
    victim.write_text("precious")
    name = str(victim).encode()
    header = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + struct.pack(">5I", 0, 0, len(begun) // 4096, 512, 4096)
    end = struct.pack(">I", 0x40000000 // 4096 + 1) + name + struct.pack(">2I", len(name), sum(name)) + header[:8]
    (folder / "study.db-journal").write_bytes(header.ljust(512, b"\0") + end)
    with pytest.raises(MlotoolError, match="a journal that names another file"):
        _take_up(folder)
    assert victim.read_text() == "precious"


def test_a_transaction_that_a_kill_has_cut_off_is_taken_back(begun: bytes, tmp_path: Path) -> None:
    made, folder = _spoiled(begun, tmp_path), tmp_path / "killed" / "sweep"
    folder.mkdir(parents=True)
    connection = sqlite3.connect(made / "study.db", isolation_level=None)
    # Pages go to the disk before the transaction ends.
    connection.execute("PRAGMA cache_size = 1")
    connection.execute("BEGIN")
    connection.execute("UPDATE trials SET number = number + 7")
    connection.execute(
        "CREATE TABLE filler AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 9000) "
        "SELECT x FROM n"
    )
    for name in ("study.db", "study.db-journal"):
        (folder / name).write_bytes((made / name).read_bytes())
    connection.close()
    assert (folder / "study.db").read_bytes() != begun
    assert _take_up(folder).next() is not None
    with sqlite3.connect(folder / "study.db") as connection:
        assert [row[0] for row in connection.execute("SELECT number FROM trials ORDER BY number")] == [0, 1]
    connection.close()


class _Call:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_cma_es_unpickles_nothing_of_a_stranger(begun: bytes, tmp_path: Path) -> None:
    made, folder = tmp_path / "made", _spoiled(begun, tmp_path)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{folder / 'study.db'}")
    trial = study.get_trials()[0]
    content = pickle.dumps(_Call(made)).hex()
    study._storage.set_trial_system_attr(trial._trial_id, "cma:optimizer:0", content)
    with pytest.raises(ConfigError, match="a pickle, which can run any code"):
        _take_up(folder, sampler="cmaes")
    assert not made.exists()
