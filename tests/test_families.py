"""Contract of the family table: for every row, every rotation leaves the function as it was."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_refused, edit_config, quantize
from safetensors.torch import load_file, save_file
from tiny_models import (
    DISTINCT,
    NEVER_TIED,
    UNTURNED,
    WRITTEN_PLAIN,
    save_model,
    stored,
    tiny_config,
    tiny_model,
    varied,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

import ptq
from ptq.hf import experts, meta_model, residual, transposed
from ptq.models import family_parts
from ptq.models.families import FAMILIES, family_or_default
from ptq.models.family import Family
from ptq.models.model_shape import shape_of
from ptq.ops import hadamard
from ptq.pipeline import balance, pipeline, rewrite
from ptq.pipeline.ends import plain_matrix
from ptq.pipeline.job import Job
from ptq.planning.outline import first_row
from ptq.planning.plan import LinearPlan, Plan, check_claims
from quarot.plan import QuarotRecipe, plan

IDS = torch.arange(3, 60).reshape(1, -1)
WITHOUT_DATA = QuarotRecipe(rounding="nearest", weight_bits=16)
WITHOUT_VALUES = {
    family_parts.GATED_ATTENTION,
    family_parts.INDEXED_ATTENTION,
    *family_parts.MLA,
    *FAMILIES["lfm2"].mixers,
    *FAMILIES["afmoe"].mixers,
    *(mixer for name in ("bailing_hybrid", "diffllama", "gpt_neox", "olmo_hybrid") for mixer in FAMILIES[name].mixers),
    *family_parts.GEMMA_4_ATTENTION,
}
SUBSETS = [{"R1"}, {"R2"}, {"R4"}, {"R1", "R2"}, {"R1", "R2", "R4"}]


class InFloat64(TorchFunctionMode):
    """The models' own norms, routers and states round to float32: here that is float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def exact(config: Any, tensors: dict[str, Tensor], family: Family | None = None) -> nn.Module:
    """A float64 model with the given tensors; its experts and linears those of transformers, or the package's for a
    family."""
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    if family is not None:
        experts.separate(model, family.experts.linears if family.experts else None)
        transposed.as_linears(model)
    state = {family_or_default(config).module_name(name): tensor.double() for name, tensor in tensors.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return model


def only(full: Plan, keep: set[str]) -> Plan:
    """The plan with some of its rotations alone."""

    def kept(rotation: Any) -> Any:  # in front of the output of a mixer R4 has no signs
        return rotation if rotation and (rotation.signs or "R4").partition(".")[0] in keep else None

    def some(linear: LinearPlan) -> LinearPlan:
        return dataclasses.replace(
            linear,
            input=kept(linear.input),
            output=kept(linear.output),
            online=linear.online if "R4" in keep else None,
            norm=linear.norm if "R1" in keep else None,
            parts=tuple(some(part) for part in linear.parts),
        )

    linears = tuple(some(linear) for linear in full.linears)
    norms = {} if "R1" in keep else {"unit_norms": (), "kept": (*full.kept, *full.unit_norms)}
    residual = full.online_residual if "R1" in keep else None
    return dataclasses.replace(full, linears=linears, online_residual=residual, **norms)


def rewritten(plan: Plan, source: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a model after a plan, in float64."""
    signs = {name: rewrite.draw_signs(name, length, 0) for name, length in plan.signs.items()}
    result = {name: torch.full_like(source[name], 1 - plan.norm_offset) for name in plan.unit_norms}
    result |= {name: source[name] for name in plan.kept}
    for linear in plan.linears:
        gain = source[linear.norm].double() + plan.norm_offset if linear.norm else None
        w, b, first, found = source[linear.source], source.get(f"{linear.name}.bias"), 0, []
        for part in linear.parts or (linear,):
            rows, factor = slice(first, first + part.n), None
            if part.balance is not None:
                factor = balance.factor(part, balance.scale_of(part.balance, source.get, plan.norm_offset))
            bias = None if b is None else rewrite.bias(part, b[rows], signs, factor)
            found.append((rewrite.weight(part, w[rows], gain, signs, factor=factor), bias))
            first += part.n
        result[f"{linear.name}.weight"] = torch.cat([w for w, _ in found])
        if b is not None:
            result[f"{linear.name}.bias"] = torch.cat([bias for _, bias in found if bias is not None])
    return result


def add_online(model: Any, plan: Plan) -> None:
    for linear in plan.linears:
        if linear.online is not None:
            order = linear.online.order
            model.get_submodule(family_or_default(model.config).module_name(linear.name)).register_forward_pre_hook(
                lambda _, inputs, order=order: (hadamard.apply(inputs[0], None, order),)
            )
    if plan.online_residual is not None:
        signs, order = rewrite.draw_signs("R1", plan.online_residual.size, 0).double(), plan.online_residual.order
        embedding, norm = residual.ends_of(model).values()
        embedding.register_forward_hook(lambda _, inputs, found: hadamard.apply(found, signs, order))
        norm.register_forward_pre_hook(lambda _, inputs: (hadamard.apply(inputs[0], signs, order, transpose=True),))


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize(
    "model_type, keep", varied(SUBSETS), ids=lambda x: x if type(x) is str else "+".join(sorted(x))
)
@torch.no_grad()
def test_rotations_keep_the_function_in_float64(model_type: str, keep: set[str]) -> None:
    config = tiny_config(model_type)
    model, family = tiny_model(config), FAMILIES[model_type]
    state, shape = model.state_dict(), shape_of(config)
    if "R1" in keep and not family.rotate_residual:
        if len(keep) < 3:
            pytest.skip(f"{model_type}: R1 is not valid for this family")
        keep = keep - {"R1"}
    if keep == {"R2"} and WITHOUT_VALUES & set(family.mixers):
        pytest.skip(f"{model_type}: no block has plain attention")
    first = first_row("key", shape, family)
    for name in state:
        if family.key in name and not family.mixers:  # for the balance: large channels in every head
            keys = state[name][first : first + shape.kv_heads * shape.head_dim]
            keys.view(shape.kv_heads, shape.head_dim, -1)[:, [1, shape.head_dim // 2 + 1]] *= 30
    source = stored(model)
    recipe = dataclasses.replace(WITHOUT_DATA, key_bits=4)
    full = plan(shape, family, recipe, source)
    check_claims(full, {name: tuple(tensor.shape) for name, tensor in source.items()})
    part = only(full, keep)
    assert any(linear.input or linear.output or linear.parts for linear in part.linears)
    embedding = f"{family.embedding}.weight"
    untied = tiny_config(model_type, tie_word_embeddings=shape.tied and not full.untied)
    original = exact(config, {**state, "lm_head.weight": source[embedding]} if shape.tied else state)
    tensors = rewritten(part, source)
    rotated = exact(untied, {"lm_head.weight": tensors[embedding], **tensors}, family)
    add_online(rotated, part)
    with InFloat64():
        assert relative(rotated(IDS).logits, original(IDS).logits) < 1e-9


@pytest.mark.parametrize("model_type, online", varied([False, True]))
@torch.no_grad()
def test_rotations_keep_the_function_through_save_and_load(model_type: str, online: bool, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", model_type)
    recipe = dataclasses.replace(WITHOUT_DATA, online=online)
    if not online and model_type not in WRITTEN_PLAIN:
        with pytest.raises(ptq.InputError, match="must be quantised"):
            ptq.quantize(model, tmp_path / "out", recipe, ptq.RunOptions(progress=False))
        return
    if not online and model_type in UNTURNED:
        with pytest.raises(ptq.InputError, match="there is nothing to rotate"):
            ptq.quantize(model, tmp_path / "out", recipe, ptq.RunOptions(progress=False))
        return
    result = ptq.quantize(model, tmp_path / "out", recipe, ptq.RunOptions(progress=False))
    assert result.rotation_error < 1e-5
    original = AutoModelForCausalLM.from_pretrained(model)
    rotated = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert relative(rotated(IDS).logits, original(IDS).logits) < 1e-5
    if FAMILIES[model_type].rotate_residual:
        alike = not FAMILIES[model_type].norm_tensors  # R1 is then in the embedding, which may be the head
        tied = (online or alike) and model_type not in NEVER_TIED
        assert rotated.config.tie_word_embeddings == tied  # otherwise the head takes the norm's gain
        found, wanted = (model.get_input_embeddings().weight for model in (rotated, original))
        assert torch.equal(found, wanted) == (tied and not alike)
        hidden = [model.get_input_embeddings()(IDS) for model in (rotated, original)]
        assert relative(*hidden) > 0.5 and relative(hidden[0].norm(dim=-1), hidden[1].norm(dim=-1)) < 1e-5


@pytest.mark.parametrize("model_type", DISTINCT)
def test_untied_heads_and_plain_widths(model_type: str, tmp_path: Path) -> None:
    changes = dict(tie_word_embeddings=False, hidden_size=64, intermediate_size=128, head_dim=16)
    if hasattr(tiny_config(model_type), "qk_rope_head_dim"):
        changes["qk_rope_head_dim"] = 16
    if model_type == "gpt_oss":
        changes["num_experts_per_tok"] = 4  # with two, one token changes one of them, which is no error of rounding
    model = save_model(tmp_path / "model", model_type, torch.bfloat16, **changes)
    recipe = QuarotRecipe(rounding="nearest", weight_bits=8)
    result = ptq.quantize(model, tmp_path / "out", recipe, ptq.RunOptions(progress=False))
    assert result.rotation_error < 1e-5
    assert result.kl < 1e-2


def test_post_norms_that_are_turned_off(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "hyperclovax", use_post_norm=False)
    check_refused(quantize("rotate", model, tmp_path / "out"), "use_post_norm false: the family is supported with its")


TWO_KINDS: dict[str, Any] = dict(
    layer_types=["full_attention", "sliding_attention"], sliding_window=16, use_sliding_window=True
)


@pytest.mark.parametrize("model_type", [*FAMILIES, "gemma3_text of two kinds", "qwen2 of two kinds"])
@torch.no_grad()
def test_parts_that_run_alone_make_the_whole_model(model_type: str, tmp_path: Path) -> None:
    model_type, _, kinds = model_type.partition(" of ")
    folder = save_model(tmp_path / "model", model_type, **(TWO_KINDS if kinds else {}))
    target = pipeline.plan(str(folder), WITHOUT_DATA)
    job = Job(recipe=WITHOUT_DATA, signs={}, device=torch.device("cpu"), **vars(target))
    hidden = job.embed([plain_matrix(job.tensor(linear.source)) for linear in job.embeddings], IDS, "original")
    for index in range(target.plan.blocks):
        hidden = job.original_block(index).run(hidden)
    logits = job.logits(
        plain_matrix(job.tensor(job.head.source)),
        {name: job.tensor(name) for name in job.final_tensors},
        hidden,
        "original",
    )
    assert relative(torch.cat(logits), AutoModelForCausalLM.from_pretrained(folder)(IDS).logits) < 5e-6


def test_blocks_that_share_an_indexer_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "glm_moe_dsa")
    edit_config(indexer_types=["full", "shared"])(folder)
    found = quantize("quarot", folder, tmp_path / "out", "--plan", "--rounding", "nearest")
    check_refused(found, "config.json: indexer_types: blocks that take over the tokens of an earlier one's indexer")


@pytest.mark.parametrize(
    "model_type, setting",
    [
        ("phi", dict(qk_layernorm=True)),
        ("lfm2_moe", dict(use_expert_bias=False)),
        ("opt", dict(do_layer_norm_before=False)),
        ("opt", dict(word_embed_proj_dim=40)),
    ],
)
def test_parts_that_no_row_says_are_refused_by_their_setting(
    model_type: str, setting: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", model_type)
    edit_config(**setting)(folder)
    found = quantize("quarot", folder, tmp_path / "out", "--plan", "--rounding", "nearest")
    check_refused(found, f"config.json: {min(setting)} ")


def test_a_list_for_blocks_has_one_entry_for_each(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "granite_swa")
    edit_config(layer_rope_theta=[0, 100.0, 100.0])(folder)
    found = quantize("quarot", folder, tmp_path / "out", "--plan", "--rounding", "nearest")
    check_refused(found, "layer_rope_theta lists 3 blocks, num_hidden_layers says 2")


def test_a_family_that_this_transformers_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "model")
    monkeypatch.setattr(meta_model, "CONFIG_MAPPING", {})
    check_refused(quantize("fp6", model, tmp_path / "out"), "knows no model_type 'llama'; a later one may")


def test_exaone_as_it_is_published(tmp_path: Path) -> None:
    """Other names of tensors and settings than transformers has: the same result, to the byte."""
    folders = [
        save_model(tmp_path / name, "exaone", tie_word_embeddings=False) for name in ("published", "transformers")
    ]
    names = load_file(folders[0] / "model.safetensors").keys()
    assert all(name.startswith(("transformer.", "lm_head.")) for name in names)
    assert "transformer.h.1.attn.attention.out_proj.weight" in names and "transformer.h.0.mlp.c_fc_1.weight" in names
    path = folders[0] / "config.json"
    config = json.loads(path.read_text())
    config["num_layers"] = config.pop("num_hidden_layers")
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps")
    config["activation_function"] = config.pop("hidden_act")
    path.write_text(json.dumps(config))
    state = tiny_model(tiny_config("exaone", tie_word_embeddings=False)).state_dict()
    save_file({name: x.contiguous() for name, x in state.items()}, folders[1] / "model.safetensors")
    packed = [folder.with_name(f"{folder.name} packed") for folder in folders]
    for folder, out in zip(folders, packed, strict=True):
        assert quantize("quarot", folder, out, "--rounding", "nearest").exit_code == 0
    weights = [(out / "model.safetensors").read_bytes() for out in packed]
    assert weights[0] == weights[1]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(out)(IDS).logits for out in packed]
    assert torch.equal(*logits) and quantize("verify", packed[0]).exit_code == 0


@pytest.mark.parametrize(
    ("model_type", "published", "own"),
    [
        *(
            (name, {f"{x}_conv1d" for x in "qkv"}, {"conv1d"})
            for name in ("kimi_linear", "bailing_hybrid", "olmo_hybrid")
        ),
        ("sarvam_moe", {"query_key_value"}, {f"{x}_proj" for x in "qkv"}),
    ],
)
def test_tensors_in_other_pieces_than_the_models(
    model_type: str, published: set[str], own: set[str], tmp_path: Path
) -> None:
    """As published, and as a run writes them: the same result, to the number."""
    folders = [save_model(tmp_path / name, model_type) for name in ("published", "rewritten")]

    def linears(folder: Path) -> set[str]:
        return {name.rpartition(".")[0].rpartition(".")[2] for name in load_file(folder / "model.safetensors")}

    assert published <= linears(folders[0]) and own.isdisjoint(linears(folders[0]))
    state = tiny_model(tiny_config(model_type)).state_dict()
    state.pop("lm_head.weight" if tiny_config(model_type).tie_word_embeddings else "", None)
    save_file({name: x.contiguous() for name, x in state.items()}, folders[1] / "model.safetensors")
    packed = [folder.with_name(f"{folder.name} packed") for folder in folders]
    for folder, out in zip(folders, packed, strict=True):
        assert quantize("quarot", folder, out, "--rounding", "nearest").exit_code == 0
    weights = [load_file(out / "model.safetensors") for out in packed]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    assert own <= linears(packed[0]) and published.isdisjoint(linears(packed[0]))


def test_joined_rows_that_are_not_those_of_the_heads(tmp_path: Path) -> None:
    edit_config(num_attention_heads=2)(save_model(tmp_path / "model", "sarvam_moe"))
    message = "attn.query_key_value.bias' has shape [160], expected 120 rows of 16-bit numbers, those of queries"
    check_refused(quantize("fp6", tmp_path / "model", tmp_path / "out"), message)


@pytest.mark.parametrize("damage", ["one is missing", "of other sizes", "of another dtype"])
def test_pieces_that_do_not_fit(damage: str, tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "olmo_hybrid") / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("k_conv1d.weight"))
    if damage == "one is missing":
        del tensors[name]
        wanted = f"holds tensor '{name.replace('k_conv', 'q_conv')}', but not '{name}', which belongs to it"
    elif damage == "of other sizes":
        tensors[name] = tensors[name][..., :2].contiguous()
        wanted = f"tensor '{name}' has shape [43, 1, 2] and dtype float32, which do not go with [43, 1, 4]"
    else:
        tensors[name] = tensors[name].half()
        wanted = f"tensor '{name}' has shape [43, 1, 4] and dtype float16, which do not go with"
    save_file(tensors, path)
    check_refused(quantize("fp6", tmp_path / "model", tmp_path / "out"), wanted)


def test_gpt2_as_it_is_published(tmp_path: Path) -> None:
    """Names without a prefix, masks beside the weights, and these as [k, n]: the same result, to the byte."""
    folders = [save_model(tmp_path / name, "gpt2", n_inner=None) for name in ("published", "transformers")]
    for folder in folders:  # which would say it, too
        config = json.loads((folder / "config.json").read_text())
        del config["head_dim"]
        (folder / "config.json").write_text(json.dumps(config))
    path = folders[0] / "model.safetensors"
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(path).items()}
    assert tensors["h.0.attn.c_attn.weight"].shape == (80, 240) and "wte.weight" in tensors
    tensors |= {f"h.{block}.attn.bias": torch.ones(1, 1, 128, 128).tril() for block in range(2)}
    save_file(tensors, path)
    packed = [folder.with_name(f"{folder.name} packed") for folder in folders]
    for folder, out in zip(folders, packed, strict=True):
        assert quantize("fp6", folder, out, "--skip", "*c_proj").exit_code == 0
    weights = [(out / "model.safetensors").read_bytes() for out in packed]
    assert weights[0] == weights[1]
    model = AutoModelForCausalLM.from_pretrained(packed[0])
    plain = model.get_submodule("transformer.h.1.attn.c_proj")
    assert isinstance(plain, nn.Linear) and torch.equal(plain.weight, tensors["h.1.attn.c_proj.weight"].T)
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights[0]
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert torch.equal(again(IDS).logits, model(IDS).logits) and quantize("verify", packed[0]).exit_code == 0
    check_refused(quantize("rotate", folders[0], tmp_path / "plain"), "gpt2: some linears must be quantised")
    assert quantize("quarot", folders[0], tmp_path / "offline", "--rounding", "nearest", "--offline").exit_code == 0
    check_refused(quantize("export", tmp_path / "offline", tmp_path / "exported"), "gpt2 is not exported")
