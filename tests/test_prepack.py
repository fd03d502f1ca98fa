"""`quantize prepack`: tiles on disk for every format, proven, loaded as they are, refused where they do not fit."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, listing, quantize
from safetensors.torch import load_file, save_file
from tiny_models import decode, save_model
from transformers import AutoModelForCausalLM

import ptq
from ptq.fast.layers import cpu_layer
from ptq.files.lock import exclusive
from ptq.files.shards import Shards
from ptq.layers import shared_input
from ptq.layers.linear import QuantLinear
from ptq.weights import formats
from ptq.weights.prepacked import PrepackedFormat
from ptq.weights.rounding import Rounded, nearest

IDS = torch.arange(3, 40).reshape(1, -1)
pytestmark = pytest.mark.usefixtures("fast")
COMMANDS = {
    "integers": ("quarot", "--rounding", "nearest", "--weight-bits", "3"),
    "everything": ("quarot", "--rounding", "nearest", "--activation-bits", "8", "--kv-bits", "4"),
    "asymmetric groups": ("quarot", "--rounding", "nearest", "--asymmetric", "--group-size", "32"),
    "small floats": ("fp6", "--element", "e3m2"),
    "powers of two": ("fp6", "--scale", "e8m0"),
    "float tokens": ("fp6", "--activation-bits", "8", "--element", "e2m2"),
}


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(IDS).logits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that groups of 32 divide."""
    sizes = dict(hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4, num_key_value_heads=2)
    return save_model(tmp_path_factory.mktemp("source") / "model", **sizes)


@pytest.fixture(scope="module", params=COMMANDS)
def both(request: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A packed checkpoint, and the prepacked one. Do not write to them."""
    folder = tmp_path_factory.mktemp("packed")
    command, *options = COMMANDS[request.param]
    assert quantize(command, model, folder / "plain", "--no-report", *options).exit_code == 0
    done = quantize("prepack", folder / "plain", folder / "tiles")
    assert done.exit_code == 0, done.output
    assert "14 linears in the layout of cpu" in done.stdout
    assert sorted(os.listdir(folder)) == ["plain", "tiles"]
    return folder / "plain", folder / "tiles"


def test_a_prepacked_checkpoint_gives_the_same_logits_and_makes_no_tiles(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, tiles = both
    expected = [logits(plain, dtype) for dtype in (torch.float32, torch.bfloat16)]
    kinds = {type(formats.get(scheme["of"]["format"])) for scheme in schemes(tiles).values()}
    for kind in kinds:
        real = kind.prepack

        def only_shapes(self: Any, parts: formats.Parts, device: Any, real: Any = real) -> formats.Parts:
            fake = all(type(tensor).__name__ == "FakeTensor" for tensor in parts.values())
            return real(self, parts, device) if fake else pytest.fail("the tiles were made again")

        monkeypatch.setattr(kind, "prepack", only_shapes)
    for dtype, before in zip((torch.float32, torch.bfloat16), expected, strict=True):
        assert torch.equal(logits(tiles, dtype), before)


def test_it_decodes_by_the_same_calls(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole layers, and products of one input together, where the plain checkpoint has them."""
    counts = []
    for folder in both:
        model, calls = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), Counter[str]()
        with monkeypatch.context() as patch:
            for module, name in ((cpu_layer, "run"), (shared_input, "_products")):
                real = getattr(module, name)

                def counted(*args: Any, real: Any = real, name: str = name, calls: Counter[str] = calls) -> Any:
                    y = real(*args)
                    calls[name] += y is not None
                    return y

                patch.setattr(module, name, counted)
            counts.append((decode(model), calls))
    assert counts[0][1] == counts[1][1] and counts[0][1]["run"] > 0
    assert all(map(torch.equal, counts[0][0], counts[1][0]))


def test_it_verifies_inspects_and_saves_itself_again(both: tuple[Path, Path], tmp_path: Path) -> None:
    plain, tiles = both
    assert quantize("verify", tiles, "--against", plain, "--json").exit_code == 0
    found = json.loads(quantize("verify", tiles, "--against", plain, "--json").stdout)
    assert found["kl"] == pytest.approx(0, abs=1e-12)
    shown = quantize("inspect", tiles)
    assert "prepacked v1" in shown.stdout and "layout=1" in shown.stdout and "{" not in shown.stdout
    loaded = AutoModelForCausalLM.from_pretrained(tiles)
    loaded.save_pretrained(tmp_path / "saved")
    name = "model.safetensors"
    assert (tmp_path / "saved" / name).read_bytes() == (tiles / name).read_bytes()


def test_twice_the_same_bytes(both: tuple[Path, Path], tmp_path: Path) -> None:
    plain, tiles = both
    assert quantize("prepack", plain, tmp_path / "again", "--target", "cpu").exit_code == 0
    assert listing(tmp_path / "again") == listing(tiles)


def schemes(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]["schemes"]


@pytest.mark.parametrize(
    "inner",
    [
        formats.get("quarot/integer", bits=3, group_size=32, symmetric=False),
        formats.get("quarot/integer", bits=4, group_size=8),
        formats.get("fp6/minifloat", element="e4m2", group_size=64),
        formats.get("fp6/minifloat", scale="e8m0", group_size=32),
        formats.get("dense", dtype="bfloat16"),
    ],
    ids=repr,
)
def test_the_format_is_the_inner_one_in_tiles(inner: formats.Format) -> None:
    n, k = 37, 192
    of = {"format": inner.name, "version": inner.version, **inner.options()}
    format = formats.get("prepacked", target="cpu", layout=1, of=of)
    assert isinstance(format, PrepackedFormat) and format.inner == inner
    assert formats.get(format.name, **format.options()) == format
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    rounded = nearest(w, inner.codebook) if inner.codebook else Rounded(w, {})
    stored, tiles = inner.pack(rounded), format.pack(rounded)
    assert {part: (tuple(t.shape), t.dtype) for part, t in tiles.items()} == format.buffers(n, k)
    assert torch.equal(format.dequantize(tiles, n, k), inner.dequantize(stored, n, k))
    assert torch.equal(format.unpack(tiles, n, k)[0], inner.unpack(stored, n, k)[0])
    assert format.prepack(tiles, "cpu").keys() == tiles.keys() == format.unprepack(tiles).keys()
    x = torch.randn(3, k)
    assert torch.equal(format.linear(x, tiles), inner.linear(x, inner.prepack(stored, "cpu")))
    layer = QuantLinear(k, n, False, format)
    assert layer.format == inner and layer.takes_integers == isinstance(inner, formats.IntegerInput)
    assert set(layer.state_dict()) == {"weight", *(f"weight_{part}" for part in tiles)}


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("sm_75", "unknown target 'sm_75'; known targets: cpu, sm_80, sm_90"),
        ("tpu", "unknown target 'tpu'; known targets: cpu, sm_80, sm_90"),
    ],
)
def test_targets_without_tiles(target: str, message: str, model: Path, tmp_path: Path) -> None:
    check_refused(quantize("prepack", model, tmp_path / "out", "--target", target), message)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("method", ["quarot", "fp6"])
def test_fragments_for_a_gpu_are_proven_and_refused_on_a_cpu(
    method: str, group: int, target: str, model: Path, tmp_path: Path
) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    done = quantize(method, model, plain, "--rounding", "nearest", "--group-size", group, "--no-report")
    assert done.exit_code == 0
    done = quantize("prepack", plain, out, "--target", target)
    assert done.exit_code == 0 and f"14 linears in the layout of {target}" in done.stdout
    stored = load_file(out / "model.safetensors")
    assert sum(name.endswith("weight_fragments") for name in stored) == 14
    assert quantize("inspect", out).exit_code == 0
    with pytest.raises(ptq.InputError, match=f"prepacked for {target}, but the model is on cpu; load the checkpoint"):
        logits(out)


def test_weights_without_a_layout_for_a_gpu_are_said(model: Path, tmp_path: Path) -> None:
    assert quantize("fp6", model, tmp_path / "plain", "--group-size", 8, "--no-report").exit_code == 0
    done = quantize("prepack", tmp_path / "plain", tmp_path / "out", "--target", "sm_90")
    check_refused(done, "no weight of it has a layout for sm_90 (its formats: fp6/minifloat)")
    assert os.listdir(tmp_path) == ["plain"]
    with pytest.raises(ptq.InputError, match="dense has no layout for sm_90"):
        formats.get("prepacked", target="sm_90", of={"format": "dense", "version": 1})
    of = {"format": "fp6/minifloat", "version": 1}
    with pytest.raises(ptq.InputError, match="prepacked for cpu, but the model is on cuda"):
        formats.get("prepacked", of=of).prepack({"tiles": torch.empty(0)}, "cuda")


def test_what_is_no_packed_checkpoint(model: Path, both: tuple[Path, Path], tmp_path: Path) -> None:
    plain, tiles = both
    check_refused(quantize("prepack", model, tmp_path / "out"), "is not quantised; run `quantize quarot`")
    check_refused(quantize("prepack", tiles, tmp_path / "out"), "is prepacked already")
    check_refused(quantize("prepack", plain, tiles), "holds a model; nothing in it was touched")
    check_refused(quantize("fp6", tiles, tmp_path / "out"), "quantised already")
    damaged = shutil.copytree(plain, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    name = next(name for name in tensors if name.endswith("weight_codes"))
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    check_refused(quantize("prepack", damaged, tmp_path / "out"), "is not the file that was written")
    assert os.listdir(tmp_path) == ["damaged"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "abacus"}, "unknown target 'abacus'"),
        ({"layout": 2}, "prepacked for cpu in layout version 2, this package reads version 1"),
        ({"version": 2}, "prepacked has layout version 2, this package reads version 1"),
        ({"of": {"format": "prepacked"}}, "`of` must describe another format"),
        ({"of": {"format": "os.system"}}, "unknown format 'os.system'"),
        ({"of": {"format": "dense", "version": 9}}, "dense has layout version 9, this package reads version 1"),
    ],
)
def test_another_target_or_layout_is_refused_before_anything_is_loaded(
    change: dict[str, Any], message: str, both: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(both[1], tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["schemes"]["scheme0"] |= change
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ptq.InputError, match=message.replace("`", ".")):
        logits(copy)
    check_refused(quantize("inspect", copy), message)
    check_refused(quantize("verify", copy), message)


def test_without_a_record(both: tuple[Path, Path], tmp_path: Path) -> None:
    """As `save_pretrained` leaves a checkpoint."""
    shutil.copytree(both[0], tmp_path / "plain")
    (tmp_path / "plain" / "ptq.json").unlink()
    assert quantize("prepack", tmp_path / "plain", tmp_path / "tiles").exit_code == 0
    assert torch.equal(logits(tmp_path / "tiles"), logits(both[1]))
    assert not (tmp_path / "tiles" / "ptq.json").exists()


def test_a_refusal_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    check_refused(quantize("prepack", model, tmp_path / "a" / "b"), "is not quantised")
    assert listing(tmp_path) == {}


def test_one_run_at_a_time(both: tuple[Path, Path], tmp_path: Path) -> None:
    with exclusive(tmp_path / "tiles"):
        check_refused(quantize("prepack", both[0], tmp_path / "tiles"), "another run is at work on it")
    assert listing(tmp_path) == {}


def test_what_the_disk_gives_back_is_compared(
    both: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Shards.finish

    def lost(self: Shards) -> None:
        self.begin()  # all zeros
        finish(self)

    monkeypatch.setattr(Shards, "finish", lost)
    check_refused(quantize("prepack", both[0], tmp_path / "tiles"), "does not give its bytes again", code=1)
    assert not (tmp_path / "tiles").exists()


def test_a_prepacked_result_is_not_the_result_of_a_run(model: Path, tmp_path: Path) -> None:
    run = ("fp6", model, tmp_path / "out", "--no-report")
    assert quantize(*run).exit_code == 0
    assert quantize("prepack", tmp_path / "out", tmp_path / "tiles").exit_code == 0
    check_refused(quantize("fp6", model, tmp_path / "tiles", "--no-report"), "nothing in it was touched")
