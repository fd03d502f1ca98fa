"""The reader: every kind of damaged or hostile checkpoint is refused in one sentence before a weight is read."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ptq.errors import InputError, RunError
from ptq.files.checkpoint import INDEX, SINGLE, Checkpoint, check_numbers, refuse_quantized
from ptq.files.header import DTYPES, read_header

CONFIG = {"model_type": "llama"}


def raw_file(header, data=b"", length=None):
    """Bytes of a safetensors file with any header: a dict, or text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin, end, shape, dtype: object = "U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def refused(folder, *words):
    with pytest.raises(InputError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value).replace(
        str(folder), ""
    )  # the folder is named after the test, often with the same words
    for word in words:
        assert word in message


def sharded(folder):
    """Two shards of two tensors each and their index."""
    tensors = {f"t{i}": torch.arange(i + 3, dtype=torch.float32) for i in range(4)}
    shards = {"a.safetensors": ["t0", "t1"], "b.safetensors": ["t2", "t3"]}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 72}, "weight_map": weight_map}))
    return tensors, weight_map


def test_reads_every_dtype_of_the_library(folder):
    made = {name: torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in DTYPES.items()}
    made |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, dtype=torch.uint8), "hollow": torch.empty(4, 0)}
    save_file(made, folder / SINGLE, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config == CONFIG
    assert set(checkpoint.tensors) == set(made) and checkpoint.nbytes == sum(t.nbytes for t in made.values())
    for name, tensor in made.items():
        read, info = checkpoint.read(name), checkpoint.tensors[name]
        assert (info.shape, info.dtype, info.nbytes) == (tuple(tensor.shape), tensor.dtype, tensor.nbytes)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape and read.data_ptr() % 64 == 0
        assert (
            read.numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes()
            if tensor.dtype.itemsize > 2
            else (torch.equal(read.view(torch.uint8), tensor.view(torch.uint8)))
        )


def test_reads_shards_and_fresh_memory(folder):
    tensors, weight_map = sharded(folder)
    checkpoint = Checkpoint.open(folder)
    assert {name: info.shard for name, info in checkpoint.tensors.items()} == weight_map
    for name, tensor in tensors.items():
        checkpoint.read(name).zero_()  # must change neither the file nor a later read
        assert torch.equal(checkpoint.read(name), tensor)
    with pytest.raises(InputError, match="no tensor 'nope'"):
        checkpoint.read("nope")


def test_a_file_that_shrinks_after_opening_is_a_run_error(folder):
    save_file({"a": torch.ones(100)}, folder / SINGLE)
    checkpoint = Checkpoint.open(folder)
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-4])
    with pytest.raises(RunError, match="model.safetensors: ended at byte"):
        checkpoint.read("a")


HOSTILE = {
    "empty file": (b"", "header does not fit"),
    "huge length": (raw_file({}, length=2**63), "header does not fit"),
    "length beyond the file": (raw_file({}, length=100), "header does not fit"),
    "pickle": (b"PK\x03\x04" + bytes(100), "save_pretrained"),
    "no brace": (raw_file(b"[1]     "), "brace"),
    "bad json": (raw_file(b'{"a":'), "not valid JSON"),
    "not utf-8": (raw_file(b'{"\xff":1}'), "not valid JSON"),
    "nested": (raw_file(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "twice": (raw_file(b'{"a":%b,"a":%b}' % ((json.dumps(entry(0, 1, [1])).encode(),) * 2), b"0"), "'a' occurs twice"),
    "huge number": (raw_file(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "nan": (raw_file(b'{"a":NaN}'), "NaN is not JSON"),
    "surrogate": (raw_file({"\ud800": entry(0, 1, [1])}, b"0"), "not valid Unicode"),
    "entry is no object": (raw_file({"a": 3}), "'a': expected dtype, shape"),
    "surplus key": (raw_file({"a": entry(0, 1, [1]) | {"x": 1}}, b"0"), "'a': expected dtype, shape"),
    "unknown dtype": (raw_file({"a": entry(0, 1, [1], "F3")}, b"0"), "'F3' is not supported"),
    "dtype is no string": (raw_file({"a": entry(0, 1, [1], ["F32"])}, b"0"), "is not supported"),
    "negative shape": (raw_file({"a": entry(0, 4, [-2, -2])}, b"0000"), "shape [-2, -2]"),
    "boolean shape": (raw_file({"a": entry(0, 1, [True])}, b"0"), "shape [True]"),
    "fractional shape": (raw_file({"a": entry(0, 1, [1.0])}, b"0"), "shape [1.0]"),
    "rank": (raw_file({"a": entry(0, 1, [1] * 1000)}, b"0"), "not a list of sizes"),
    "negative offset": (raw_file({"a": entry(-1, 0, [1])}, b"0"), "data_offsets"),
    "backwards": (raw_file({"a": entry(1, 0, [1])}, b"0"), "span -1"),
    "overflow": (raw_file({"a": entry(0, 0, [2**32, 2**32])}), "span 0"),
    "size": (raw_file({"a": entry(0, 7, [2], "F32")}, bytes(7)), "takes 8 bytes"),
    "overlap": (raw_file({"a": entry(0, 2, [2]), "b": entry(1, 3, [2])}, bytes(3)), "'b' overlaps"),
    "hole": (raw_file({"a": entry(0, 1, [1]), "b": entry(2, 3, [1])}, bytes(3)), "'b' leaves a hole"),
    "late start": (raw_file({"a": entry(1, 2, [1])}, bytes(2)), "'a' leaves a hole"),
    "truncated": (raw_file({"a": entry(0, 4, [4])}, bytes(3)), "truncated"),
    "tail": (raw_file({"a": entry(0, 4, [4])}, bytes(5)), "1 bytes after the last tensor"),
    "metadata": (raw_file({"__metadata__": {"a": 1}}), "__metadata__"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header(folder, case):
    data, words = HOSTILE[case]
    (folder / SINGLE).write_bytes(data)
    refused(folder, SINGLE, words)


def test_header_over_the_limit_is_not_read(folder):
    with (folder / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)  # sparse: takes no disk
    refused(folder, "over the limit")


def test_zero_sized_tensors_may_share_an_offset(folder):
    header = {"a": entry(0, 2, [2]), "z": entry(2, 2, [0]), "b": entry(0, 0, [0, 9]), "c": entry(2, 3, [1])}
    (folder / SINGLE).write_bytes(raw_file(header, b"xyz"))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.read("b").shape == (0, 9) and checkpoint.read("c").tolist() == [ord("z")]


def test_missing_and_truncated_shard(folder):
    sharded(folder)
    (folder / "b.safetensors").write_bytes((folder / "b.safetensors").read_bytes()[:-1])
    refused(folder, "b.safetensors", "truncated")
    (folder / "b.safetensors").unlink()
    refused(folder, "b.safetensors", "shard is missing")
    os.mkfifo(folder / "b.safetensors")  # opening it would wait for ever
    refused(folder, "b.safetensors", "shard is missing")


@pytest.mark.parametrize(
    "name",
    [f"{name}.safetensors" for name in ("../a", "/etc/a", "sub/a", "a\0", "x\\a", "n" * 5000)]
    + ["..", "", 7, None, "pytorch_model.bin"],
)
def test_index_names_only_plain_safetensors_files(folder, name):
    _, weight_map = sharded(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map | {"t0": name}}))
    refused(folder, INDEX, "safetensors file" if name == "pytorch_model.bin" else "")


def test_index_and_shards_must_agree(folder):
    _, weight_map = sharded(folder)
    for changed, words in (
        (weight_map | {"extra": "a.safetensors"}, ("'extra'", "a.safetensors")),
        (weight_map | {"t0": "b.safetensors"}, ("'t0'", "b.safetensors")),
        ({name: shard for name, shard in weight_map.items() if name != "t3"}, ("'t3'", "not listed")),
        ({}, ("weight_map",)),
    ):
        (folder / INDEX).write_text(json.dumps({"weight_map": changed}))
        refused(folder, INDEX, *words)


def test_a_tensor_in_two_shards_is_refused(folder):
    tensors, _ = sharded(folder)
    save_file({name: tensors[name] for name in ("t0", "t2", "t3")}, folder / "b.safetensors")
    refused(folder, "'t0' of b.safetensors is not listed")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"[]", "expected a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"model_type": 3}', "`model_type`"),
        (b"{}", "`model_type`"),
        (b" " * 16_000_001, "larger than"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_bad_config(folder, config, words):
    save_file({"a": torch.ones(1)}, folder / SINGLE)
    (folder / "config.json").write_bytes(config)
    refused(folder, "config.json", words)


def test_folders_without_a_checkpoint(folder):
    refused(folder, "neither model.safetensors nor")
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    refused(folder, "pytorch_model.bin", "save_pretrained")
    save_file({"a": torch.ones(1)}, folder / "model-00001-of-00002.safetensors")
    refused(folder, "model-00001-of-00002.safetensors", "if that is all, name it model.safetensors")
    save_file({"a": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")
    refused(folder, "model-00001-of-00002.safetensors", "fetch the missing index")
    (folder / "config.json").unlink()
    refused(folder, "config.json: missing")
    refused(folder / "nowhere", "not a folder")


def test_single_file_beside_an_index_is_ambiguous(folder):
    sharded(folder)
    save_file({"a": torch.ones(1)}, folder / SINGLE)
    refused(folder, "holds both")


def test_identity_sees_config_index_header_and_samples(folder):
    sharded(folder)
    seen = {Checkpoint.open(folder).identity()}
    assert Checkpoint.open(folder).identity() in seen  # the same twice

    def changed():
        seen.add(Checkpoint.open(folder).identity())
        return len(seen)

    (folder / "config.json").write_text(json.dumps(CONFIG | {"x": 1}))
    assert changed() == 2
    (folder / INDEX).write_text((folder / INDEX).read_text() + "\n")
    assert changed() == 3
    shard = folder / "b.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    assert changed() == 4
    shard.write_bytes(shard.read_bytes().replace(b'"pt"', b'"tp"'))
    assert changed() == 5


def test_identity_samples_evenly_to_the_end(folder):
    save_file({"a": torch.zeros(1 << 20)}, folder / SINGLE)  # 4 MiB: 1024 pages, 64 of them sampled
    before = Checkpoint.open(folder).identity()
    start = Checkpoint.open(folder).shards[SINGLE][0]
    for position in (start, start + (4 << 20) - 1, start + ((4 << 20) - 4096) * 31 // 63):
        with (folder / SINGLE).open("r+b") as file:
            file.seek(position)
            file.write(b"\1")
        assert Checkpoint.open(folder).identity() != before
        with (folder / SINGLE).open("r+b") as file:
            file.seek(position)
            file.write(b"\0")
    assert Checkpoint.open(folder).identity() == before


def test_quantised_sources_are_refused():
    refuse_quantized(CONFIG | {"quantization_config": None})
    with pytest.raises(InputError, match="quantised already.*'gptq'"):
        refuse_quantized(CONFIG | {"quantization_config": {"quant_method": "gptq"}})
    for found in ({"quantization_config": {}}, {"compression_config": "x"}):
        with pytest.raises(InputError, match="quantised already.*'unknown'"):
            refuse_quantized(CONFIG | found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_check_numbers(dtype):
    tensor = torch.ones(5, 37).to(dtype)
    check_numbers(Path("m"), "w", tensor)
    tensor[3, 9] = float("inf")
    tensor[4, 1] = float("nan")
    tensor[4, 36] = float("nan")
    with pytest.raises(InputError, match=r"m: tensor 'w' holds 2 NaN and 1 Inf of 185 values, the first at \[3, 9\]"):
        check_numbers(Path("m"), "w", tensor)


def test_check_numbers_at_every_position_and_other_shapes():
    for at in range(67):  # vector bodies and tails
        for value in (float("nan"), float("inf"), -float("inf")):
            tensor = torch.zeros(67)
            tensor[at] = value
            with pytest.raises(InputError, match=rf"first at \[{at}\]"):
                check_numbers(Path("m"), "w", tensor)
    with pytest.raises(InputError, match=r"1 NaN"):
        check_numbers(Path("m"), "w", torch.tensor(float("nan")))
    check_numbers(Path("m"), "w", torch.empty(0))
    check_numbers(Path("m"), "w", torch.ones(3, dtype=torch.int32))
    check_numbers(Path("m"), "w", torch.full((3,), -1e15))


def test_numbers_that_no_model_is_trained_to():
    """Their squares leave float32: a flipped bit of an exponent makes such a one."""
    tensor = torch.ones(5, 37)
    tensor[2, 1], tensor[4, 0] = -3e38, 2e15
    message = r"m: tensor 'w' holds 2 of 185 values beyond 1e\+15, up to 3e\+38, the first at \[2, 1\]; the"
    with pytest.raises(InputError, match=message):
        check_numbers(Path("m"), "w", tensor)


def test_read_header_of_the_library_agrees_on_positions(tmp_path):
    save_file({"b": torch.ones(3, dtype=torch.uint8), "a": torch.ones(2)}, tmp_path / "x.safetensors")
    tensors, start = read_header(tmp_path / "x.safetensors")
    assert list(tensors) == ["a", "b"]
    assert tensors["a"].offset == start and tensors["b"].offset == start + 8
