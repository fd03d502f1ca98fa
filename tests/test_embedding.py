"""Embedding and head in few bits (`ptq.layers.embedding`): plan, bytes, loading, and the model around them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_config, edit_tensors, listing, quantize
from safetensors.torch import load_file, save_file
from test_finetune_models import TINY, recipe
from tiny_models import NEVER_TIED, WRITTEN_PLAIN, save_model, varied
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import ptq
from ptq.errors import InputError
from ptq.files.checkpoint import Checkpoint
from ptq.layers.embedding import PackedEmbedding, TiedHead
from ptq.layers.linear import QuantLinear, swap
from ptq.models.families import FAMILIES
from ptq.pipeline import finetune_blocks, needs, stages
from ptq.pipeline.ends import plain_matrix
from ptq.pipeline.tasks import Tasks
from ptq.pipeline.work import RECORD
from ptq.recipe import Recipe
from ptq.reporting import contents, report_schema
from quarot.integer import IntegerFormat
from quarot.plan import QuarotRecipe

pytestmark = pytest.mark.usefixtures("fast")
QUIET = ptq.RunOptions(progress=False)
IDS = torch.arange(3, 40).reshape(1, -1)
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
INT8 = {"format": "quarot/integer", "version": 1, "bits": 8, "group_size": 0, "symmetric": True}


def ends(**changes: Any) -> QuarotRecipe:
    """Nothing but embedding and head is rounded, unless `changes` say more."""
    return QuarotRecipe(**{**dict(rounding="nearest", weight_bits=16, rotate=False, embedding_bits=8), **changes})


def load(folder: Path, dtype: torch.dtype = torch.float32, kind: Any = AutoModelForCausalLM) -> Any:
    model, info = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    return model


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits


def matrix(folder: Path, name: str, k: int | None = None) -> Tensor:
    """The numbers that the stored bytes of the embedding or the head stand for."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    entry = config["schemes"][config["linears"][name]]
    format = IntegerFormat(**{key: entry[key] for key in ("bits", "group_size", "symmetric")})
    stored = load_file(folder / "model.safetensors")
    parts = {part: stored[f"{name}.weight_{part}"] for part in ("codes", "scale")}
    k = k or json.loads((folder / "config.json").read_text())["hidden_size"]
    return format.dequantize(parts, len(parts["codes"]), k)


@pytest.mark.parametrize("model_type, tied", varied([False, True], WRITTEN_PLAIN))
def test_every_family_is_the_original_with_other_numbers(model_type: str, tied: bool, tmp_path: Path) -> None:
    """Scaled embeddings, multipliers of logits, caps: whatever a family does, it does with the decoded rows."""
    tied = tied and model_type not in NEVER_TIED
    source = save_model(tmp_path / "model", model_type, tie_word_embeddings=tied)
    ptq.quantize(source, tmp_path / "out", ends(), QUIET)
    model, oracle = load(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    assert isinstance(model.get_output_embeddings(), TiedHead if tied else QuantLinear)
    for name, module in oracle.named_modules():
        rows = isinstance(module, torch.nn.Embedding) and name != FAMILIES[model_type].positions
        if rows or (name == HEAD and not tied):
            stored = FAMILIES[model_type].head if name == HEAD else name
            module.weight.data = matrix(tmp_path / "out", stored, module.weight.shape[1])
    expected, found = logits(oracle), logits(model)
    never = expected.isneginf()  # tokens that the model rules out
    assert torch.equal(never, found.isneginf())
    torch.testing.assert_close(found[~never], expected[~never], rtol=2e-4, atol=2e-4 * expected[~never].abs().max())
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)), expected)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_in_the_models_dtype(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """To the bit what the plain embedding gives of the decoded weight in that dtype, scaled or not."""
    source = save_model(tmp_path / "model", model_type)
    ptq.quantize(source, tmp_path / "out", ends(), QUIET)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).get_input_embeddings()
    plain.weight.data = matrix(tmp_path / "out", EMBEDDING).to(dtype)
    loaded = load(tmp_path / "out", torch.float32 if dtype == torch.float16 else dtype)
    packed = loaded.to(dtype).get_input_embeddings()
    for ids in (IDS, IDS.int(), IDS[:, :1], IDS[:, :0], IDS.expand(3, -1)):
        assert packed(ids).dtype == dtype and torch.equal(packed(ids), plain(ids))
    assert packed.to(torch.float32)(IDS).dtype == torch.float32
    for wrong in (-1, packed.num_embeddings):
        with pytest.raises((IndexError, RuntimeError)):
            packed(torch.tensor([[wrong]]))


@pytest.mark.parametrize("rotations", ["none", "online", "fused"])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_bytes_and_loading(bits: int, rotations: str, tmp_path: Path) -> None:
    """With fused rotations alone a tied head becomes a weight of its own. Loaded, saved, copied, without a head,
    prepacked: the same."""
    source = save_model(tmp_path / "model", hidden_size=64, tie_word_embeddings=True, **SMALL)
    out = tmp_path / "out"
    untied, changes = rotations == "fused", dict(rotate=rotations != "none", online=rotations == "online")
    ptq.quantize(source, out, ends(weight_bits=4, embedding_bits=bits, **changes), QUIET)
    names = {name.rpartition(".weight")[0] for name in load_file(out / "model.safetensors") if name.endswith("codes")}
    assert {EMBEDDING} < names and (HEAD in names) == untied
    assert (f"{HEAD}.weight" in load_file(out / "model.safetensors")) == untied
    model = load(out)
    assert model.config.tie_word_embeddings != untied
    expected = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert torch.equal(logits(load(tmp_path / "saved")), expected)
    with torch.no_grad():
        assert torch.equal(load(out, kind=AutoModel)(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    greedy = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert load(out, torch.bfloat16).generate(IDS, **greedy).shape == (1, IDS.shape[1] + 6)
    assert quantize("prepack", out, tmp_path / "prepacked", "--target", "cpu").exit_code == 0
    assert torch.equal(logits(load(tmp_path / "prepacked")), expected)
    assert quantize("verify", tmp_path / "prepacked").exit_code == 0


SMALL: dict[str, Any] = dict(intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)


def test_a_tied_weight_is_held_once(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", tie_word_embeddings=True)
    ptq.quantize(source, tmp_path / "out", ends(), QUIET)
    model = load(tmp_path / "out")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert [name for name, _ in head.named_parameters()] == ["weight"] and not list(head.children())
    assert "tiles" in embedding.parts() and "codes" not in embedding.parts()
    assert set(model.state_dict()) - {f"{HEAD}.weight"} == set(load_file(tmp_path / "out" / "model.safetensors"))
    with torch.no_grad():
        embedding.parts()["scale"].zero_()
    assert not logits(model).any()


def test_an_offloaded_weight_is_fetched_by_the_head_too(tmp_path: Path) -> None:
    """accelerate loads the tensors of a module when that is called, and no others."""
    for tied in (True, False):
        source = save_model(tmp_path / f"model{tied}", tie_word_embeddings=tied)
        out = tmp_path / f"out{tied}"
        ptq.quantize(source, out, ends(), QUIET)
        spilled = dict(device_map={"": "disk"}, offload_folder=tmp_path / "offload", dtype=torch.float32)
        found, expected = logits(AutoModelForCausalLM.from_pretrained(out, **spilled)), logits(load(out))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max())


def test_a_model_with_another_head(tmp_path: Path) -> None:
    """A classifier has no use for the packed head."""
    source = save_model(tmp_path / "model", tie_word_embeddings=False)
    ptq.quantize(source, tmp_path / "out", ends(), QUIET)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        hidden = load(tmp_path / "out").model(IDS).last_hidden_state
        assert torch.equal(classifier.model(IDS).last_hidden_state, hidden)


def test_its_size_is_what_it_is(out: Path) -> None:
    model = load(out)
    table = model.get_input_embeddings()
    assert model.resize_token_embeddings() is table
    assert model.resize_token_embeddings(table.num_embeddings) is table
    assert copy.deepcopy(model).resize_token_embeddings() is not table
    with pytest.raises(InputError, match=f"packed, with {table.num_embeddings} rows, and cannot be given 1000"):
        model.resize_token_embeddings(1000)
    assert model.resize_token_embeddings(pad_to_multiple_of=table.num_embeddings // 2) is table
    with pytest.raises(InputError, match=f"cannot be given {table.num_embeddings + 1}"):
        model.resize_token_embeddings(pad_to_multiple_of=table.num_embeddings + 1)


def test_the_plan(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", hidden_size=96, **SMALL, tie_word_embeddings=False)
    for bits, group in ((8, 32), (6, 32), (4, 32)):
        found = ptq.plan(str(source), ends(embedding_bits=bits)).plan
        expected = dict.fromkeys((EMBEDDING, HEAD), IntegerFormat(bits, group))
        assert {linear.name: linear.format for linear in found.ends()} == expected
        assert not any(linear.format for linear in found.linears if linear.name.startswith("model.layers"))
        assert not needs.needs_text(found, QuarotRecipe(embedding_bits=bits, weight_bits=16))
    assert not any(linear.format for linear in ptq.plan(str(source), ends(embedding_bits=16)).plan.linears)
    odd = save_model(tmp_path / "odd", tie_word_embeddings=True)
    assert [linear.format for linear in ptq.plan(str(odd), ends()).plan.ends()] == [IntegerFormat(8, 0)]


def test_what_a_run_says_of_them(tmp_path: Path, calibration_text: Path) -> None:
    source = save_model(tmp_path / "model", vocab_size=2000, tie_word_embeddings=False)
    plain = quantize("fp6", source, tmp_path / "plain")
    assert "embeddings and head are " in plain.stderr and "see --embedding-bits" in plain.stderr
    done = quantize("fp6", source, tmp_path / "out", "--embedding-bits", 8, "--calibration", calibration_text,
                    "--sequence-length", 32)  # fmt: skip
    assert done.exit_code == 0 and "--embedding-bits" not in done.stderr
    found = report_schema.read(tmp_path / "out" / report_schema.JSON)
    before = report_schema.read(tmp_path / "plain" / report_schema.JSON)
    sizes, whole = ({share.part: share.after for share in report.shares} for report in (found, before))
    for name in ("embedding", "head"):
        assert 0.5 < sizes[name] / (whole[name] / 4) < 1.5  # float32 in the source
    layers = {layer.name: layer for layer in found.layers}
    assert 0 < layers[EMBEDDING].error < 1e-3 and layers[EMBEDDING].storage.startswith("quarot/integer bits=8")
    inside = contents.summary(Checkpoint.open(tmp_path / "out"))
    assert {EMBEDDING, HEAD} in [set(group.linears) for group in inside.groups]
    assert inside.bits_per_weight == pytest.approx(found.bits_per_weight, rel=1e-5)
    rotated = quantize("rotate", source, tmp_path / "rotated")  # which has no such option
    assert rotated.exit_code == 0 and "--embedding-bits" not in rotated.stderr


@pytest.mark.parametrize("tied", [True, False])
def test_fine_tuning_around_a_packed_head(tied: bool, tmp_path: Path) -> None:
    """Everything but embedding and head is trained, and what is trained gets better."""
    source = save_model(tmp_path / "model", **TINY, tie_word_embeddings=tied)
    found = {}
    for kind in ("none", "full"):
        ptq.quantize(source, tmp_path / kind, recipe(source, finetune=kind, embedding_bits=8), QUIET)
        found[kind] = load_file(tmp_path / kind / "model.safetensors")
    changed = {name for name, tensor in found["full"].items() if not torch.equal(tensor, found["none"][name])}
    assert changed and not any(name.startswith((EMBEDDING, HEAD)) for name in changed)
    losses = json.loads((tmp_path / "full" / RECORD).read_text())["finetuning"]["whole model"]
    assert min(losses) <= losses[0]
    assert logits(load(tmp_path / "full")).isfinite().all()


def test_the_teacher_reads_the_original_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block is trained on is what the original block makes of the original's input, not of the packed one."""
    source, embed, teach = save_model(tmp_path / "model", **TINY), stages.embed, finetune_blocks.teach
    rows: list[Tensor] = []
    checked: list[bool] = []

    @torch.no_grad()
    def taught(tasks: Tasks, index: int, part: Any) -> None:
        teach(tasks, index, part)
        if index == 0:
            weight = plain_matrix(tasks.job.tensor(f"{EMBEDDING}.weight"))
            entered = tasks.job.embed([weight], tasks.chunks_of(rows[0])[0], "original")
            left = tasks.teacher.read(tasks.teacher.files(1)[0])
            packed = tasks.hidden.read(tasks.hidden.files(0)[0])
            checked.append(torch.equal(left, part.run(entered)) and not torch.equal(entered, packed))

    monkeypatch.setattr(stages, "embed", lambda tasks, given: rows.append(given) or embed(tasks, given))
    monkeypatch.setattr(finetune_blocks, "teach", taught)
    ptq.quantize(source, tmp_path / "out", recipe(source, finetune="blocks", embedding_bits=4), QUIET)
    assert checked == [True]


@pytest.mark.parametrize("bits", [0, 3, 5, 7, 32, -8])
def test_bits_that_there_are_not(bits: Any) -> None:
    with pytest.raises(InputError, match="--embedding-bits must be"):
        QuarotRecipe(embedding_bits=bits)


def test_refused_on_the_command_line(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    before = listing(tmp_path)
    check_refused(
        quantize("quarot", source, tmp_path / "out", "--embedding-bits", 5), "--embedding-bits must be 4, 6 or 8"
    )
    assert listing(tmp_path) == before


@pytest.fixture
def out(tmp_path: Path) -> Path:
    ptq.quantize(save_model(tmp_path / "model"), tmp_path / "out", ends(), QUIET)
    return tmp_path / "out"


def scheme(folder: Path, change: dict[str, Any]) -> None:
    """Change what config.json says of every packed weight."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    schemes = {name: {**entry, **change} for name, entry in config["schemes"].items()}
    edit_config(quantization_config={**config, "schemes": schemes})(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hadamard": "sylvester:2"}, "model.embed_tokens: an embedding has no hadamard"),
        ({"signs": True}, "model.embed_tokens: an embedding has no signs"),
        ({"activation": {"bits": 8, "clip": 1.0}}, "model.embed_tokens: an embedding has no activation"),
        ({"version": 7}, "has layout version 7"),
        ({"bits": 9}, "bits must be 2 to 8"),
    ],
)
def test_a_config_that_says_nonsense(out: Path, change: dict[str, Any], message: str) -> None:
    scheme(out, change)
    with pytest.raises(InputError, match=message):
        load(out)


def test_a_tied_head_that_is_listed_as_well(tmp_path: Path) -> None:
    ptq.quantize(save_model(tmp_path / "model", tie_word_embeddings=False), tmp_path / "out", ends(), QUIET)
    edit_config(tie_word_embeddings=True)(tmp_path / "out")
    message = "quantization_config lists the head, but tie_word_embeddings ties it"
    with pytest.raises(InputError, match=message):
        load(tmp_path / "out")
    for command in ("inspect", "verify"):
        result = quantize(command, tmp_path / "out")
        assert result.exit_code == 2 and result.stdout == ""


def test_a_format_without_rows(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    entry = {"format": "dense", "version": 1, "dtype": "float32"}
    edit_config(quantization_config={**config, "schemes": dict.fromkeys(config["schemes"], entry)})(out)
    with pytest.raises(InputError, match="no rows can be read from dense"):
        load(out)


@pytest.mark.parametrize("part", ["weight_codes", "weight_scale", "weight"])
def test_damaged_bytes(out: Path, part: str) -> None:
    name = f"{EMBEDDING}.{part}"
    edit_tensors(lambda tensors: tensors.update({name: tensors[name][:-1]}))(out)
    with pytest.raises((InputError, RuntimeError), match=name.replace(".", r"\.")):
        load(out)
    edit_tensors(lambda tensors: tensors.pop(name))(out)
    with pytest.raises(InputError, match=f"tensor '{name}' is missing"):
        load(out)


def test_an_embedding_that_does_more_than_look_up() -> None:
    class Strange(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    model = nn.Module()
    model.table = Strange(4, 8)
    with pytest.raises(InputError, match="table is a Strange, whose rows this package cannot decode"):
        swap(model, "table", INT8)


def test_nan_in_the_embedding_is_refused(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{EMBEDDING}.weight"][5, 3] = torch.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    check_refused(quantize("fp6", source, tmp_path / "out", "--embedding-bits", 8), f"{EMBEDDING}.weight")


def test_recipes_of_all_methods_have_it() -> None:
    assert "embedding_bits" in Recipe.__dataclass_fields__
    for command in ("quarot", "quip-sharp", "fp6"):
        assert "--embedding-bits" in quantize(command, "--help").output
