"""Fine-tuning of models that are rotated for good, and of weights with scales of groups: QuaRot and FP6."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interrupted_runs import QUIET, check_all_continue, contents, photographed
from safetensors.torch import load_file
from test_finetune_models import TRAINED, check_losses, differing, losses, recipe, tensors
from tiny_models import CACHED, TINY, save_model
from transformers import AutoConfig, AutoModelForCausalLM

import ptq
from fp6.plan import Fp6Recipe
from ptq.demo import demo_path
from ptq.kv import attention
from ptq.kv.kv_cache import CacheQuantization
from ptq.layers.packed_weight import loaded_signs
from ptq.ops import hadamard
from ptq.pipeline import pipeline, token_rows, trainable
from ptq.planning.plan import LinearPlan, Rotation
from ptq.recipe import Recipe
from ptq.statistics import chunks
from ptq.weights.grouped import SCALE
from quarot.plan import QuarotRecipe

W2A6KV4: dict[str, Any] = dict(
    weight_bits=2, group_size=8, activation_bits=6, activation_clip="search", key_bits=4, value_bits=4, cache_clip=0.95,
    seed=1,  # not every draw of so small a model gains from training as a whole
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick(fast: None) -> Iterator[None]:
    """One row in a chunk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_TOKENS", 32)
        yield


def made(model: Path, kind: type[Recipe] = QuarotRecipe, **changes: Any) -> Any:
    """The recipe of `test_finetune_models`, of another method."""
    like = recipe(model)
    shared = {name: getattr(like, name) for name in ("calibration", "samples", "sequence_length", "finetune_epochs")}
    return kind(**{"finetune": "full", **shared, **changes})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("source") / "model", **TINY)


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Results without fine-tuning, by blocks and in full."""
    folder, kinds = tmp_path_factory.mktemp("results"), ("none", "blocks", "full")
    for kind in kinds:
        ptq.quantize(model, folder / kind, made(model, finetune=kind, **W2A6KV4), QUIET)
    return {kind: folder / kind for kind in kinds}


def test_no_loss_ends_above_its_start_and_the_whole_falls(results: dict[str, Path]) -> None:
    check_losses(results, 4)


def test_the_second_stage_changes_no_code(results: dict[str, Path]) -> None:
    """But scales, biases, norms, and the head, which is the embedding here."""
    vectors = {f"{linear}_proj.{leaf}" for leaf in (SCALE, "bias")
               for linear in ("q", "k", "v", "o", "gate", "up", "down")}  # fmt: skip
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"}
    assert differing(results["blocks"], results["full"]) == vectors | norms | {"embed_tokens.weight"}


def test_what_is_rounded_first_has_the_codes_of_a_run_without(results: dict[str, Path]) -> None:
    plain, tuned = tensors(results["none"]), tensors(results["blocks"])
    names = [name for name in plain if ".0.self_attn." in name and name.endswith("weight_codes")]
    assert {name for name in names if not torch.equal(plain[name], tuned[name])} == {
        "model.layers.0.self_attn.o_proj.weight_codes"
    }
    assert not torch.equal(*(found["model.layers.0.self_attn.q_proj.weight_scale"] for found in (plain, tuned)))


@pytest.mark.parametrize("model_type", TRAINED)
def test_the_teacher_is_the_rotated_model_of_every_family(model_type: str, tmp_path: Path) -> None:
    """With weights of eight bits the packed model equals its teacher closely, in every turn and as a whole."""
    source = save_model(tmp_path / "model", model_type, **TINY, num_hidden_layers=1, tie_word_embeddings=False)
    cached = model_type in CACHED
    asked = made(source, weight_bits=8, rounding="nearest", finetune_epochs=1, sequence_length=16, samples=8)
    if cached:
        asked = replace(asked, activation_bits=8, key_bits=8, value_bits=8)
    ptq.quantize(source, tmp_path / "out", asked, QUIET)
    found = losses(tmp_path / "out")
    assert len(found) >= 3 and max(curve[0] for curve in found.values()) < 0.01


def test_losses_are_those_of_the_written_model(model: Path, results: dict[str, Path]) -> None:
    """Where training within blocks ends and the whole model begins, on the row that is held out: the state behind the
    first block, relative, and KL. The packed states are rotated."""
    asked = made(model, finetune="blocks", **W2A6KV4)
    rows, _ = token_rows.choose(pipeline.plan(str(model), asked).plan, AutoConfig.from_pretrained(model), asked, model)
    assert rows is not None
    with torch.no_grad():
        original, packed = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(rows[-1:], output_hidden_states=True)
            for folder in (model, results["blocks"])
        )
    quantization = json.loads((results["blocks"] / "config.json").read_text())["quantization_config"]
    signs = loaded_signs(tensors(results["blocks"])["model.embed_tokens.residual_signs"])
    state = hadamard.apply(original.hidden_states[1], signs, quantization["residual_rotation"]["hadamard"])
    error = (packed.hidden_states[1] - state).square().sum() / state.square().sum()
    p, q = (found.logits.log_softmax(-1) for found in (original, packed))
    kl = (p.exp() * (p - q)).sum(-1).mean()
    found = losses(results["full"])
    assert min(found["block 0 after down"]) == pytest.approx(float(error), rel=1e-3)
    assert found["whole model"][0] == pytest.approx(float(kl), rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [dict(activation_clip="search"), dict(online=False), dict(rotate=False), dict(rotate=False, key_bits=4)],
    ids=["searched", "offline", "plain", "keys"],
)
def test_inputs_of_linears_that_are_rounded_later_are_so_while_others_are_trained(
    options: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Weights of eight bits change next to nothing, so from the first turn on a block errs as in the end."""
    asked = made(model, weight_bits=8, rounding="nearest", activation_bits=4, finetune_epochs=1, **options)
    ptq.quantize(model, tmp_path / "out", asked, QUIET)
    first, *others = (curve[0] for name, curve in losses(tmp_path / "out").items() if name.startswith("block 0"))
    assert len(others) == 3 and first > 1e-3 and all(loss == pytest.approx(first, rel=0.1) for loss in others)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (QuarotRecipe, dict(weight_bits=3, online=False, group_size=8)),
        (QuarotRecipe, dict(weight_bits=3, rotate=False, symmetric=False)),
        (QuarotRecipe, dict(weight_bits=3, group_size=8, scale="integer", activation_bits=8)),
        (QuarotRecipe, dict(weight_bits=3, key_bits=3, embedding_bits=8)),
        (Fp6Recipe, dict(element="e2m1", rounding="gptq", group_size=8)),
        (Fp6Recipe, dict(element="e2m1", scale="e8m0", group_size=8, rotate=True, activation_bits=8)),
        (Fp6Recipe, dict(element="auto", rotate=True)),
    ],
    ids=["offline", "asymmetric", "integer scales", "keys and ends", "fp6", "e8m0", "auto"],
)
def test_other_recipes(kind: type[Recipe], options: dict[str, Any], tmp_path: Path) -> None:
    """And a head of its own."""
    source = save_model(tmp_path / "model", **TINY, tie_word_embeddings=False, num_hidden_layers=1)
    ptq.quantize(source, tmp_path / "plain", made(source, kind, finetune="none", **options), QUIET)
    ptq.quantize(source, tmp_path / "out", made(source, kind, **options), QUIET)
    found = losses(tmp_path / "out")
    assert all(min(curve) <= curve[0] for curve in found.values())
    assert min(found["whole model"]) < found["whole model"][0]
    moved = {name.rpartition(".")[2] for name in differing(tmp_path / "plain", tmp_path / "out")}
    assert (SCALE in moved) and "weight" in moved


@pytest.mark.parametrize(
    "options", [dict(online=False), dict(skip=("*.down_proj",)), dict(skip=("*.q_proj",))], ids=str
)
def test_a_head_that_was_tied_and_linears_that_are_left_out(options: dict[str, Any], tmp_path: Path) -> None:
    """Offline, the head has a weight of its own afterwards; the rotation of down_proj's input acts all the same."""
    source = save_model(tmp_path / "model", **TINY, num_hidden_layers=1)
    ptq.quantize(source, tmp_path / "out", made(source, weight_bits=8, rounding="nearest", **options), QUIET)
    found = losses(tmp_path / "out")
    assert all(min(curve) <= curve[0] < 0.01 for curve in found.values()) and len(found["whole model"]) > 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Fp6Recipe, dict(element="e2m1", scale="e8m0", group_size=8)),
        (QuarotRecipe, dict(scale="integer", group_size=8)),
    ],
    ids=["e8m0", "integer scales"],
)
def test_where_nothing_can_move_the_loss_is_measured(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Norms without tensors, no biases, scales that stand still."""
    source = save_model(tmp_path / "model", "olmo", **TINY, num_hidden_layers=1, attention_bias=False)
    assert not any("bias" in name for name in load_file(source / "model.safetensors"))
    ptq.quantize(source, tmp_path / "out", made(source, kind, finetune="blocks", **options), QUIET)
    found = losses(tmp_path / "out")
    assert len(found["block 0 after down"]) == 1 and len(found["block 0 after query"]) > 1


def test_scales_move_by_a_share_of_their_own_size() -> None:
    """Those of rows of zeros are 1, whatever the size of the others."""
    values = {"a.weight_scale": torch.tensor([[1.0], [-0.01]]), "a.bias": torch.zeros(2)}
    job: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(tensors={"a.bias": SimpleNamespace(dtype=torch.float32)}),
        plan=SimpleNamespace(kept=(), unit_norms=()),
    )
    found = inspect.unwrap(trainable.vectors)(job, [LinearPlan("a", 2, 8, "a.weight")], values, 0.5)
    assert found["a.bias"].rate == 0.5 * trainable.VECTOR_RATE and found["a.weight_scale"].dtype == torch.bfloat16
    torch.testing.assert_close(
        found["a.weight_scale"].rate, 0.5 * trainable.VECTOR_RATE * torch.tensor([[1.0], [0.01]])
    )


def test_a_crash_at_any_moment_costs_nothing(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", **TINY, num_hidden_layers=1)
    asked = made(model, sequence_length=16, finetune_epochs=1, **W2A6KV4)
    pictures, expected = photographed(model, tmp_path, asked)
    changes = [{str(path.relative_to(picture / "out.work")) for path in (picture / "out.work").rglob("tuned/*")}
               for picture in pictures]  # fmt: skip
    moments = [index for index in range(1, len(pictures)) if changes[index] != changes[index - 1]]
    assert len(moments) > 12
    check_all_continue([pictures[index] for index in moments[::3]], expected, model, asked)


def test_without_fine_tuning_a_record_is_as_it_was(model: Path) -> None:
    for kind in (QuarotRecipe, Fp6Recipe):
        assert not any(
            name.startswith("finetune") for name in made(model, kind, finetune="none", finetune_epochs=5).as_dict()
        )
        assert made(model, kind).as_dict()["finetune"] == "full"


def test_twice_the_same_bytes(results: dict[str, Path], model: Path, tmp_path: Path) -> None:
    ptq.quantize(model, tmp_path / "again", made(model, **W2A6KV4), QUIET)
    assert contents(tmp_path / "again") == contents(results["full"])


# --- parts ----------------------------------------------------------------------------------------------------------


def test_who_teaches(model: Path) -> None:
    turned, tied = made(model, online=False), made(model, rounding="nearest")
    plain = made(model, rotate=False, activation_bits=8)
    for asked, teacher in ((turned, "rotated"), (tied, "rotated"), (plain, "original"), (recipe(model), "original")):
        assert trainable.taught_by(pipeline.plan(str(model), asked).plan) == teacher


def test_what_a_layer_undoes_itself() -> None:
    turn, other = Rotation(8, 8, "a"), Rotation(8, 8)
    plain = LinearPlan("a", 8, 8, "a.weight")
    assert plain.undone and replace(plain, input=turn, online=turn, output=other, online_output=other).undone
    for changes in (dict(input=turn), dict(input=turn, online=other), dict(output=turn), dict(norm="norm.weight")):
        assert not replace(plain, **changes).undone


@pytest.mark.parametrize("sinks", [0, 2])
def test_keys_and_values_of_few_bits_pass_the_gradient_on(sinks: int) -> None:
    """As plain ones would, at the numbers that are seen."""
    settings = CacheQuantization(4, 3, 0.95, 0.9, sinks, hadamard.construction(8))
    module, generator = torch.nn.Module(), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    module.num_key_value_groups = 2  # type: ignore[assignment]
    expected, _ = attention.forward(settings, module, q, k, v, None)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    with attention.straight_through():
        found, _ = attention.forward(settings, module, given[0], given[1], given[2], None)
    torch.testing.assert_close(found, expected)
    up = torch.randn(found.shape, generator=generator)
    found.backward(up)
    keys, values = attention.quantized(k, v, settings, None)
    seen = [x.clone().requires_grad_() for x in (q, keys, values)]
    wide = [x.repeat_interleave(2, 1) for x in seen[1:]]
    turned = attention.rotate(seen[0], settings)
    plain = torch.nn.functional.scaled_dot_product_attention(turned, wide[0], wide[1], is_causal=True)
    plain.transpose(1, 2).backward(up)
    assert seen[1].grad is not None
    wanted = seen[0].grad, hadamard.apply(seen[1].grad, None, hadamard.construction(8), transpose=True), seen[2].grad
    for ours, exact in zip((x.grad for x in given), wanted, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="no gradient through a quantised KV cache"):
        attention.forward(settings, module, given[0], k, v, None)[0].sum().backward()


# --- a real model ---------------------------------------------------------------------------------------------------


def test_the_demo_comes_closer_to_its_original_on_text_that_it_was_not_tuned_on(tmp_path: Path) -> None:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_TOKENS", 1024)
        for kind in ("none", "blocks"):
            asked = QuarotRecipe(
                weight_bits=2, group_size=32, finetune=kind, finetune_epochs=1, samples=32, sequence_length=256,
                calibration=str(demo_path() / "calibration.txt"),
            )  # fmt: skip
            found[kind] = ptq.quantize(demo_path(), tmp_path / kind, asked, QUIET).kl
    assert found["blocks"] < 0.8 * found["none"]
