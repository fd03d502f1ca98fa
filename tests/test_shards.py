"""The writer: exact bytes, whole files or none, shards like those of transformers, memory that does not grow."""

import errno
import io
import json
import os
import subprocess
import sys

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save, save_file

from ptq.errors import RunError
from ptq.files.checkpoint import INDEX, SINGLE, Checkpoint
from ptq.files.header import DTYPES
from ptq.files.shards import Shards, atomic_file, layout, remove_leftovers, write_bytes, write_json, write_tensors


def every_dtype():
    torch.manual_seed(0)
    made = {name.lower(): torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in DTYPES.items()}
    odd = {
        "weight": torch.empty(0),
        'quote"\\\n\x01\u2028é😀': torch.ones(2),
        "scalar": torch.tensor(1, dtype=torch.int8),
    }
    return made | odd


def test_golden_bytes(tmp_path):
    write_tensors(
        tmp_path / "x",
        {
            "z": torch.tensor([1, -1], dtype=torch.int8),
            "a": torch.tensor([1.0]),
            "e": torch.empty(0, dtype=torch.uint8),
        },
        {"format": "pt"},
    )
    header = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"z":{"dtype":"I8","shape":[2],"data_offsets":[4,6]},"e":{"dtype":"U8","shape":[0],"data_offsets":[6,6]}}'
    )
    header += b" " * (-len(header) % 8)
    assert (tmp_path / "x").read_bytes() == len(header).to_bytes(8, "little") + header + b"\0\0\x80\x3f\x01\xff"


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_bytes_of_the_library_in_any_order(tmp_path, metadata):
    tensors = every_dtype()
    for given in (tensors, dict(reversed(tensors.items()))):
        write_tensors(tmp_path / "x", given, metadata)
        assert (tmp_path / "x").read_bytes() == save(tensors, metadata=metadata)


def test_non_contiguous_and_metadata_order(tmp_path):
    weight = torch.arange(12.0).view(3, 4).T.requires_grad_()
    write_tensors(tmp_path / "x", {"w": weight}, {"b": "1", "a": "2"})
    once = (tmp_path / "x").read_bytes()
    write_tensors(tmp_path / "x", {"w": weight}, {"a": "2", "b": "1"})
    assert (tmp_path / "x").read_bytes() == once and torch.equal(load_file(tmp_path / "x")["w"], weight)


def test_write_json(tmp_path):
    write_json(tmp_path / "x.json", {"b": [1], "a": "é"})
    assert (tmp_path / "x.json").read_bytes() == b'{\n  "a": "\\u00e9",\n  "b": [\n    1\n  ]\n}\n'


def test_a_failure_keeps_the_old_file_and_leaves_nothing(tmp_path):
    write_bytes(tmp_path / "x", b"old")
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "x", 3) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]
    with atomic_file(tmp_path / "x", 3) as file:
        file.write(b"new")
        assert (tmp_path / "x").read_bytes() == b"old"  # until the end
    assert (tmp_path / "x").read_bytes() == b"new" and os.listdir(tmp_path) == ["x"]


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_a_run_error(tmp_path, monkeypatch, call):
    write_bytes(tmp_path / "x", b"old")
    monkeypatch.setattr(os, call, full_disk)
    with pytest.raises(RunError, match=r"x: writing 12 bytes failed \(No space left on device; \d+ are free\)"):
        write_bytes(tmp_path / "x", b"twelve bytes")
    assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_a_limit_on_the_size_of_files_is_told_as_such(tmp_path, monkeypatch):
    def refuse(*given):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RunError, match=r"File too large; \d+ are free\); raise the limit .*ulimit -f.* again$"):
        write_bytes(tmp_path / "x", b"twelve bytes")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_write_that_the_kernel_refuses(tmp_path, monkeypatch):
    """The real error, from a device that is always full, through the same path as a temporary file."""
    opened = io.open
    monkeypatch.setattr(io, "open", lambda path, mode="r", *rest, **more: opened("/dev/full", "wb"))
    with pytest.raises(RunError, match="writing 4.* bytes failed .No space left"):
        write_tensors(tmp_path / "x", {"w": torch.ones(1 << 20)})
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_a_small_file_system_that_really_fills(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        write_tensors(tmp_path / "old", {"w": torch.ones(10)})
        with pytest.raises(RunError, match="No space left on device; [0-9]+ are free"):
            write_tensors(tmp_path / "x", {"w": torch.ones(1 << 20)})
        assert os.listdir(tmp_path) == ["old"]
        write_tensors(tmp_path / "x", {"w": torch.ones(1 << 10)})  # the space is free again
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_missing_folder_is_a_run_error(tmp_path):
    with pytest.raises(RunError, match="nowhere/x: writing 1 bytes failed .No such file"):
        write_bytes(tmp_path / "nowhere" / "x", b"1")


def test_leftovers_are_removed(tmp_path):
    for name in ("block-0.safetensors.12ab.tmp", "block-0.safetensors"):
        (tmp_path / name).write_bytes(b"")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["block-0.safetensors"]


KILLED = """
import os, sys, torch
from ptq.files.shards import write_tensors
os.fsync = lambda handle: os.kill(os.getpid(), 9)
write_tensors(sys.argv[1], {"w": torch.zeros(1000)})
"""


def test_a_kill_leaves_the_old_file_and_one_leftover(tmp_path):
    write_tensors(tmp_path / "x", {"w": torch.ones(3)})
    before = (tmp_path / "x").read_bytes()
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "x")]).returncode == -9
    assert (tmp_path / "x").read_bytes() == before and len(list(tmp_path.glob("*.tmp"))) == 1
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["x"]


def specs(sizes):
    """Tensors of so many bytes, named so that their order is not alphabetical."""
    return {f"t.{'zyxwvut'[i]}": (torch.uint8, (size,)) for i, size in enumerate(sizes)}


def values(tensors):
    return {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in tensors.items()}


@pytest.mark.parametrize("limit", [1, 9, 10, 11, 20, 25, 30, 49, 50, 51, 1000])
@pytest.mark.parametrize("sizes", [[10, 10, 10, 10, 10], [1, 30, 0, 5, 40, 3, 2], [60], [0]])
def test_shards_equal_those_of_the_hub(sizes, limit):
    tensors = specs(sizes)
    made = layout(tensors, limit)
    theirs = split_torch_state_dict_into_shards(
        values(tensors), filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    assert list(made.headers) == list(theirs.filename_to_tensors)
    for shard, names in theirs.filename_to_tensors.items():
        assert {name for name, info in made.tensors.items() if info.shard == shard} == set(names)
    assert made.nbytes == theirs.metadata["total_size"]


def test_filled_in_any_order_the_shards_are_what_the_library_writes(tmp_path):
    tensors = specs([10, 10, 0, 30, 7])
    filled, made = values(tensors), layout(tensors, 30)
    shards = Shards(made, tmp_path / "out")
    assert not shards.begun()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "left.safetensors").write_text("of another run")
    shards.begin()
    assert shards.begun() and sorted(os.listdir(tmp_path / "out")) == sorted(made.headers)
    for name in reversed(filled):
        shards.place({name: filled[name]})
    assert all(torch.equal(shards.read(name), tensor) for name, tensor in filled.items())
    write_json(tmp_path / "out" / "config.json", {"model_type": "llama"})
    shards.finish()
    for shard in made.headers:
        names = [name for name, info in made.tensors.items() if info.shard == shard]
        assert (tmp_path / "out" / shard).read_bytes() == save(
            {name: filled[name] for name in names}, metadata={"format": "pt"}
        )
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 57} and len(made.headers) == 3
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in filled.items())


def test_one_shard_of_every_dtype_equals_save_file(tmp_path):
    tensors = every_dtype()
    made = layout({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, 1 << 30)
    shards = Shards(made, tmp_path)
    shards.begin()
    shards.place(tensors)
    shards.finish()
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / SINGLE).read_bytes() == (tmp_path / "theirs").read_bytes()
    assert not (tmp_path / INDEX).exists()


def test_a_non_contiguous_tensor_is_placed_in_its_own_order(tmp_path):
    weight = torch.arange(12.0).view(3, 4).T.requires_grad_()
    shards = Shards(layout({"w": (torch.float32, (4, 3))}, 100), tmp_path)
    shards.begin()
    shards.place({"w": weight})
    assert torch.equal(shards.read("w"), weight)


def test_other_shards_are_not_taken_for_these(tmp_path):
    shards = Shards(layout(specs([4, 4]), 100), tmp_path / "out")
    shards.begin()
    path = tmp_path / "out" / SINGLE
    whole = path.read_bytes()
    for other in (whole[:-1], whole + b"0", whole.replace(b"t.z", b"t.a"), b""):
        path.write_bytes(other)
        assert not shards.begun()
    path.write_bytes(whole)
    assert shards.begun()
    path.unlink()
    assert not shards.begun()


def test_a_disk_that_is_full_while_tensors_are_placed(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        shards = Shards(layout({"w": (torch.float32, (1 << 20,))}, 1 << 30), tmp_path / "out")
        shards.begin()
        with pytest.raises(RunError, match=r"writing 4194304 bytes failed .No space left on device; \d+ are free"):
            shards.place({"w": torch.ones(1 << 20)})
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
