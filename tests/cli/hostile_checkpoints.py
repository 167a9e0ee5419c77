"""Checkpoints that a stranger could hand on: pickles that build too much, and zip files that lie."""

import io
import math
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.cli.hostile_folders import ESCAPE, hostile

Change = Callable[[dict[str, Any]], None]


def _each(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("*.ckpt"))


def _change(run: Path, change: Change) -> None:
    """Change our part of each checkpoint."""
    for file in _each(run):
        content = torch.load(file, weights_only=True)
        change(content["mlotool"])
        torch.save(content, file)


def _pickled(run: Path, pickle_bytes: bytes, members: dict[str, bytes] | None = None) -> None:
    """Put a pickle of one's own into each checkpoint."""
    for file in _each(run):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x/data.pkl", pickle_bytes)
            archive.writestr("x/byteorder", b"little")
            archive.writestr("x/version", b"3\n")
            for name, content in (members or {}).items():
                archive.writestr(f"x/{name}", content)


def _module(state: dict[str, Any]) -> dict[str, Any]:
    module: dict[str, Any] = state["program"]["classifier"]["module"]
    return module


@hostile
def a_checkpoint_that_asks_for_all_memory(run: Path, outside: Path) -> None:
    call = b"cbuiltins\nbytearray\n\x8a\x08" + struct.pack("<q", 20_000_000_000) + b"\x85R"
    _pickled(run, b"\x80\x02}X\x07\x00\x00\x00mlotool" + call + b"s.")


@hostile
def a_checkpoint_that_asks_for_memory_often(run: Path, outside: Path) -> None:
    call = b"cbuiltins\nbytearray\nJ" + struct.pack("<i", 2_000_000_000) + b"\x85R"
    _pickled(run, b"\x80\x02](" + call * 10 + b"e.")


@hostile
def a_checkpoint_whose_tensors_ask_for_all_memory(run: Path, outside: Path) -> None:
    call = b"ctorch\nTensor\n\x8a\x08" + struct.pack("<q", 10**13) + b"\x85R"
    _pickled(run, b"\x80\x02}X\x07\x00\x00\x00mlotool" + call + b"s.")


@hostile
def a_checkpoint_of_lists_in_lists(run: Path, outside: Path) -> None:
    laughs: Any = "x"
    for _ in range(40):
        laughs = [laughs] * 10

    def change(state: dict[str, Any]) -> None:
        state["tick"] = laughs

    _change(run, change)


@hostile
def a_checkpoint_of_lists_in_its_metrics(run: Path, outside: Path) -> None:
    laughs: Any = "x"
    for _ in range(40):
        laughs = [laughs] * 10

    def change(state: dict[str, Any]) -> None:
        state["metrics"] = {"a/b": laughs, "val/accuracy": laughs}
        state["random_states"] = laughs
        state["program"]["classifier"] = laughs

    _change(run, change)


@hostile
def a_checkpoint_of_dicts_in_dicts(run: Path, outside: Path) -> None:
    laughs: Any = 1
    for _ in range(40):
        laughs = {str(index): laughs for index in range(10)}
    _change(run, lambda state: state.update(program=laughs, schedule=laughs, window=laughs))


@hostile
def a_checkpoint_that_contains_itself(run: Path, outside: Path) -> None:
    circle: dict[str, Any] = {}
    circle["x"] = circle
    _change(run, lambda state: state.update(program=circle, schedule=circle, window=circle, metrics=circle))


@hostile
def a_checkpoint_so_deep(run: Path, outside: Path) -> None:
    _pickled(run, b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".")


@hostile
def a_checkpoint_whose_keys_collide(run: Path, outside: Path) -> None:
    prime = (1 << 61) - 1
    pairs = b"".join(pickle.dumps(prime * each, 2)[2:-1] + b"N" for each in range(2**20, 2**20 + 200_000))
    _pickled(run, b"\x80\x02}(" + pairs + b"u.")


@hostile
def a_checkpoint_of_a_later_tick(run: Path, outside: Path) -> None:
    _change(run, lambda state: state.update(tick=10**600, training_s=math.inf))


@hostile
def a_checkpoint_of_no_tick(run: Path, outside: Path) -> None:
    _change(run, lambda state: state.update(tick=-5))


@hostile
def a_checkpoint_whose_tick_is_a_text(run: Path, outside: Path) -> None:
    _change(run, lambda state: state.update(tick=ESCAPE))


@hostile
def a_checkpoint_whose_tick_is_true(run: Path, outside: Path) -> None:
    _change(run, lambda state: state.update(tick=True, metrics_position=10**18))


@hostile
def a_checkpoint_of_nan(run: Path, outside: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        for value in _module(state).values():
            value.fill_(math.nan)

    _change(run, change)


@hostile
def a_checkpoint_of_other_kinds(run: Path, outside: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        module = _module(state)
        for key in module:
            module[key] = module[key].to(torch.complex64)

    _change(run, change)


@hostile
def a_checkpoint_of_sparse_tensors(run: Path, outside: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        module = _module(state)
        for key in module:
            module[key] = torch.sparse_coo_tensor(
                torch.zeros(1, 1, dtype=torch.long), [1.0], (10**12,), check_invariants=False
            )

    _change(run, change)


@hostile
def a_checkpoint_on_no_device(run: Path, outside: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        module = _module(state)
        for key in module:
            module[key] = torch.empty(10**12, device="meta")

    _change(run, change)


@hostile
def a_checkpoint_with_commands_in_its_keys(run: Path, outside: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        _module(state)[ESCAPE] = torch.zeros(1)
        state["program"][ESCAPE] = {}
        state["metrics"] = {ESCAPE: 1.0, "<script>alert(1)</script>": 2.0}

    _change(run, change)


@hostile
def a_checkpoint_of_another_program(run: Path, outside: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["program"] = {"other": state["program"]["classifier"]}

    _change(run, change)


@hostile
def a_checkpoint_of_optimizer_nonsense(run: Path, outside: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        for key in list(state["program"]["classifier"]):
            if key != "module":
                state["program"]["classifier"][key] = {
                    "state": {0: {"step": "x", "exp_avg": torch.zeros(0)}},
                    ESCAPE: 3,
                }

    _change(run, change)


@hostile
def a_checkpoint_of_random_nonsense(run: Path, outside: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["random_states"] = [{"torch": torch.zeros(10**3), "python": ["x"], "numpy": {"a": 3}}, ESCAPE]
        state["metrics"] = {1: None, "val/accuracy": "x"}
        state["window"] = {ESCAPE: 3}

    _change(run, change)


@hostile
def a_checkpoint_of_lightnings_nonsense(run: Path, outside: Path) -> None:
    for file in _each(run):
        content = torch.load(file, weights_only=True)
        for key in list(content):
            if key != "mlotool":
                content[key] = [ESCAPE]
        torch.save(content, file)


@hostile
def a_checkpoint_of_lightnings_huge_counts(run: Path, outside: Path) -> None:
    for file in _each(run):
        content = torch.load(file, weights_only=True)
        content.update(epoch=10**18, global_step=-(10**18))
        content["callbacks"] = {key: {"value": [1]} for key in content.get("callbacks", {})}
        torch.save(content, file)


@hostile
def a_checkpoint_that_was_written_in_the_old_way(run: Path, outside: Path) -> None:
    for file in _each(run):
        torch.save(torch.load(file, weights_only=True), file, _use_new_zipfile_serialization=False)


@hostile
def a_checkpoint_that_is_a_tar_file(run: Path, outside: Path) -> None:
    for file in _each(run):
        with tarfile.open(file, "w") as archive:
            for name in ("sys_info", "storages", "tensors", "pickle"):
                content = pickle.dumps(_Made(outside / "made"), 2)
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


@hostile
def a_checkpoint_that_is_code(run: Path, outside: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(torch.nn.Linear(2, 2))
        for file in _each(run):
            torch.jit.save(scripted, str(file))


@hostile
def a_checkpoint_of_nothing(run: Path, outside: Path) -> None:
    for file in _each(run):
        file.write_bytes(b"")


@hostile
def a_checkpoint_with_paths_in_it(run: Path, outside: Path) -> None:
    for file in _each(run):
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("../../../../outside/made", b"x")
            archive.writestr("/etc/made", b"x")


@hostile
def a_checkpoint_of_overlapping_parts(run: Path, outside: Path) -> None:
    """Each member of the list is the same bytes of the file."""
    for file in _each(run):
        block = bytes(1_000_000)
        local = b"PK\x03\x04" + struct.pack(
            "<5H3I2H", 20, 0, 0, 0, 0, zipfile.crc32(block), len(block), len(block), 1, 0
        )
        names = [f"x/data/{index}" for index in range(60_000)]
        listed = b"".join(
            b"PK\x01\x02"
            + struct.pack(
                "<6H3I5H2I", 20, 20, 0, 0, 0, 0, zipfile.crc32(b""), len(block), len(block), len(name), *[0] * 6
            )
            + name.encode()
            for name in names
        )
        body = local + b"x" + block
        count = len(names) & 0xFFFF
        end = b"PK\x05\x06" + struct.pack("<4H2IH", 0, 0, count, count, len(listed), len(body), 0)
        file.write_bytes(body + listed + end)


@hostile
def a_checkpoint_of_wrong_zip64_sizes(run: Path, outside: Path) -> None:
    for file in _each(run):
        content = bytearray(file.read_bytes())
        place = content.rfind(b"PK\x01\x02")
        content[place + 20 : place + 28] = b"\xff" * 8
        file.write_bytes(content)


@hostile
def a_checkpoint_of_two_lists(run: Path, outside: Path) -> None:
    """Two zip files, one behind the other: who reads from the front finds another one than who reads from the end."""
    for file in _each(run):
        evil = io.BytesIO()
        torch.save({"mlotool": _Made(outside / "made")}, evil)
        file.write_bytes(evil.getvalue() + file.read_bytes())


@hostile
def a_checkpoint_with_an_archive_in_its_comment(run: Path, outside: Path) -> None:
    for file in _each(run):
        evil = io.BytesIO()
        torch.save({"mlotool": _Made(outside / "made")}, evil)
        content = bytearray(file.read_bytes())
        end = content.rfind(b"PK\x05\x06")
        comment = evil.getvalue()[:65_000]
        content[end + 20 : end + 22] = struct.pack("<H", len(comment))
        file.write_bytes(bytes(content) + comment)


@hostile
def a_checkpoint_as_large_as_a_disk(run: Path, outside: Path) -> None:
    for file in _each(run):
        with file.open("r+b") as opened:
            opened.truncate(200_000_000_000)


@hostile
def a_checkpoint_that_repeats_its_memory(run: Path, outside: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        memory = torch.zeros(250_000)
        state["program"]["classifier"]["module"] = {f"k{index}": memory for index in range(200_000)}

    _change(run, change)


@hostile
def a_checkpoint_of_many_small_things(run: Path, outside: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["metrics"] = {f"a/{index}": 1.0 for index in range(300_000)}

    _change(run, change)


@hostile
def checkpoints_without_end(run: Path, outside: Path) -> None:
    for index in range(3_000):
        (run / "checkpoints" / f"tick_{index}.ckpt").write_bytes(b"x")


@hostile
def checkpoints_that_are_folders(run: Path, outside: Path) -> None:
    for file in _each(run):
        file.unlink()
        file.mkdir()
        (file / "inside").write_text("x")


@hostile
def a_checkpoint_with_a_name_of_commands(run: Path, outside: Path) -> None:
    for file in _each(run):
        file.rename(file.with_name(f"{ESCAPE}\n{file.stem[:4]}.ckpt".replace("/", "")))


@hostile
def a_checkpoint_of_wrapped_tensors(run: Path, outside: Path) -> None:
    """torch rebuilds a subclass by a class that the file names."""
    call = b"ctorch._utils\n_rebuild_wrapper_subclass\n(cbuiltins\nset\nctorch\nfloat32\n"
    sizes = b"(\x8a\x08" + struct.pack("<q", 10**13) + b"t(K\x01tK\x00ctorch.serialization\n_get_layout\n"
    layout = b"X\x0d\x00\x00\x00torch.strided\x85Rctorch\ndevice\nX\x03\x00\x00\x00cpu\x85R\x89tR"
    _pickled(run, b"\x80\x02}X\x07\x00\x00\x00mlotool" + call + sizes + layout + b"s.")


@hostile
def a_checkpoint_of_a_size_without_end(run: Path, outside: Path) -> None:
    """A storage of nothing, and a tensor on it that claims what is not there, or lies before its beginning."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
    for offset, size, stride in ((0, 10**12, 0), (10**12, 4, 1), (0, 4, -1)):
        words = b"".join(b"\x8a\x08" + struct.pack("<q", each) for each in (offset,))
        shape = b"\x8a\x08" + struct.pack("<q", size) + b"\x85" + b"\x8a\x08" + struct.pack("<q", stride) + b"\x85"
        call = (
            b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + words + shape + b"\x89ccollections\nOrderedDict\n)RtR"
        )
        _pickled(run, b"\x80\x02}X\x07\x00\x00\x00mlotool" + call + b"s.", {"data/0": bytes(4)})


class _Made:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)
