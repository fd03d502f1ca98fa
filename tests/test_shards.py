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

from ptq.checkpoint import INDEX, SINGLE, Checkpoint
from ptq.errors import InputError, RunError
from ptq.header import DTYPES
from ptq.shards import atomic_file, merge, plan_shards, remove_leftovers, write_bytes, write_json, write_tensors


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
from ptq.shards import write_tensors
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


def blocks(tmp_path, sizes):
    """One block file per list of tensor sizes (bytes), the tensors in one dict in the order of the model."""
    tensors, paths = {}, []
    for number, block in enumerate(sizes):
        made = {
            f"b{number}.{'zyxwv'[i]}": torch.randint(0, 9, (size,), dtype=torch.uint8) for i, size in enumerate(block)
        }
        paths.append(tmp_path / f"block-{number}.safetensors")
        write_tensors(paths[-1], made)
        tensors |= made
    return tensors, paths


@pytest.mark.parametrize("limit", [1, 9, 10, 11, 20, 25, 30, 49, 50, 51, 1000])
@pytest.mark.parametrize("sizes", [[[10, 10], [10, 10, 10]], [[1, 30], [0, 5], [40, 3, 2]], [[60]], [[0]]])
def test_shards_equal_those_of_the_hub(tmp_path, sizes, limit):
    tensors, paths = blocks(tmp_path, sizes)
    plan = plan_shards(paths, list(tensors), limit)
    theirs = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    assert {shard: list(names) for shard, names in plan.files.items()} == theirs.filename_to_tensors
    assert plan.nbytes == theirs.metadata["total_size"]


def test_merge_writes_what_the_library_would(tmp_path):
    tensors, paths = blocks(tmp_path, [[10, 10], [0, 30], [7]])
    out = tmp_path / "out"
    out.mkdir()
    write_json(out / "config.json", {"model_type": "llama"})
    plan = plan_shards(paths, list(tensors), 30)
    merge(plan, out, {"total_parameters": 57})
    for shard, names in plan.files.items():
        assert (out / shard).read_bytes() == save({name: tensors[name] for name in names}, metadata={"format": "pt"})
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"] == {"total_parameters": 57, "total_size": 57} and len(plan.files) == 3
    checkpoint = Checkpoint.open(out)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in tensors.items())
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    merge(plan, out, {"total_parameters": 57})
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_merge_of_one_file_equals_save_file(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    tensors = every_dtype()
    names = sorted(tensors)
    write_tensors(paths[0], {name: tensors[name] for name in names[::2]})
    write_tensors(paths[1], {name: tensors[name] for name in names[1::2]})
    merge(plan_shards(paths), tmp_path)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / SINGLE).read_bytes() == (tmp_path / "theirs").read_bytes()
    assert not (tmp_path / INDEX).exists()


def test_merge_refuses_what_does_not_fit_together(tmp_path):
    tensors, paths = blocks(tmp_path, [[1], [2]])
    with pytest.raises(InputError, match="block-0.safetensors: tensor 'b0.z' is in"):
        plan_shards([paths[0], paths[0]])
    for order in (["b0.z"], [*tensors, "more"], ["b0.z", "b0.z"], [*tensors, "b0.z"]):
        with pytest.raises(InputError, match="merge: the block files and the expected tensors differ"):
            plan_shards(paths, order)
    plan = plan_shards(paths)
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    with pytest.raises(RunError, match="block-1.safetensors: ended"):
        merge(plan, tmp_path)
    assert not (tmp_path / SINGLE).exists() and not list(tmp_path.glob("*.tmp"))


# Not ru_maxrss, which a process inherits from the one that started it, nor the peak since the start, which the imports
# may have set: writing 5 to clear_refs resets the peak to what is in use now.
PEAK = """
import sys
from pathlib import Path
from ptq.shards import merge, plan_shards
def status(key):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(key))
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
merge(plan_shards(sorted(Path(sys.argv[1]).glob("block*"))), sys.argv[1])
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
def test_merge_takes_one_buffer_of_memory(tmp_path):
    for number in range(2):
        write_tensors(tmp_path / f"block{number}", {f"w{number}": torch.zeros(64 << 20, dtype=torch.uint8)})
    peak = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(peak.stdout) < 32 << 10  # KiB: an 8 MiB buffer, where one tensor alone is 64 MiB
    assert (tmp_path / SINGLE).stat().st_size > 128 << 20
