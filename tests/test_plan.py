"""The plan as data: every tensor is claimed once, and what one layer undoes another one has done."""

import dataclasses
from typing import Any

import pytest
import torch
from conftest import by_role
from tiny_models import PLAIN_ATTENTION, tiny_config

import ptq
from ptq.hf.meta_model import check_promised
from ptq.hf.packed_config import PtqConfig
from ptq.kv.kv_cache import CacheQuantization
from ptq.models.families import FAMILIES
from ptq.models.model_shape import ModelShape, shape_of
from ptq.pipeline import rewrite
from ptq.planning.plan import LinearPlan, Plan, Rotation, check_claims
from quarot.plan import WITHOUT_CENTERS, QuarotRecipe, plan

SHAPE = shape_of(tiny_config("llama"))
PLAIN = QuarotRecipe(rounding="nearest")


def tensors(shape: ModelShape, biases: bool = True) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama of that shape."""
    width, values = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inside = {
        "self_attn.q_proj": (width, shape.hidden), "self_attn.k_proj": (values, shape.hidden),
        "self_attn.v_proj": (values, shape.hidden), "self_attn.o_proj": (shape.hidden, width),
        "mlp.gate_proj": (shape.intermediate, shape.hidden), "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    found["model.norm.weight"] = (shape.hidden,)
    for index in range(shape.blocks):
        for name, size in inside.items():
            found[f"model.layers.{index}.{name}.weight"] = size
            if biases:
                found[f"model.layers.{index}.{name}.bias"] = size[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{index}.{norm}.weight"] = (shape.hidden,)
    if not shape.tied:
        found["lm_head.weight"] = (shape.vocab, shape.hidden)
    return found


def make(
    shape: ModelShape = SHAPE, recipe: QuarotRecipe = PLAIN, family: Any = FAMILIES["llama"], **extra: Any
) -> Plan:
    names = [*tensors(shape), *extra.get("names", ())]
    return plan(shape, family, recipe, dict.fromkeys(names, torch.empty(())))


def part(made: Plan, name: str) -> LinearPlan:
    found = made.linear(name)
    assert found is not None, name
    return found


# --- claims ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_every_tensor_is_claimed(tied: bool, biases: bool) -> None:
    shape = dataclasses.replace(SHAPE, tied=tied)
    check_claims(make(shape), tensors(shape, biases))


def test_any_missing_tensor_is_an_error() -> None:
    found, made = tensors(SHAPE, biases=False), make()
    for name in found:
        with pytest.raises(ptq.InputError, match=f"no tensor '{name}'"):
            check_claims(made, {other: shape for other, shape in found.items() if other != name})


def test_any_unclaimed_tensor_is_an_error() -> None:
    found, made = tensors(SHAPE), make()
    for extra in ("model.layers.0.mlp.router.weight", "model.norm.bias",
                  "model.layers.0.self_attn.q_proj.weight_scale", "score.weight"):  # fmt: skip
        with pytest.raises(ptq.InputError, match=f"tensor '{extra}' is nothing"):
            check_claims(made, {**found, extra: (1,)})
    with pytest.raises(ptq.InputError, match=r"'model.layers.2.self_attn.q_proj.weight': .* promises 2 blocks, 0 to 1"):
        check_claims(made, {**found, "model.layers.2.self_attn.q_proj.weight": (1,)})
    with pytest.raises(ptq.InputError, match="and 1 more"):
        check_claims(made, {**found, "a": (1,), "b": (1,)})


def test_any_wrong_shape_is_an_error() -> None:
    found, made = tensors(SHAPE), make()
    for linear in made.linears:
        for name in {linear.source, f"{linear.name}.bias"} & found.keys():
            with pytest.raises(ptq.InputError, match=f"'{name}' has shape"):
                check_claims(made, {**found, name: (*found[name][:-1], found[name][-1] + 1)})


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.bias", "model.layers.1.mlp.up_proj.weight"])
def test_tensors_are_those_of_the_config(name: str) -> None:
    """A missing one would be filled with random numbers, a surplus one left out."""
    made, found = make(), tensors(SHAPE)
    check_promised(made, FAMILIES["llama"], found, found.keys())
    with pytest.raises(ptq.InputError, match=f"has no tensor '{name}', but its config.json promises it"):
        check_promised(made, FAMILIES["llama"], found.keys() - {name}, found.keys())
    with pytest.raises(ptq.InputError, match=f"holds tensor '{name}', but its config.json does not promise it"):
        check_promised(made, FAMILIES["llama"], found, found.keys() - {name})


def test_a_stored_copy_of_a_tied_head_and_rotary_tables_are_unused() -> None:
    names = ("lm_head.weight", "model.layers.1.self_attn.rotary_emb.inv_freq")
    made = make(names=names)
    assert set(made.unused) == set(names)
    check_claims(made, {**tensors(SHAPE), names[0]: (96, 72), names[1]: (10,)})


# --- rotations meet their inverses ----------------------------------------------------------------------------------


ROLES = {"query", "key", "value", "attention_output", "gate", "up", "down"}


def signs(made: Plan) -> rewrite.Signs:
    return {name: rewrite.draw_signs(name, length, 0) for name, length in made.signs.items()}


@pytest.mark.parametrize("online", [True, False])
@pytest.mark.parametrize("model_type", PLAIN_ATTENTION)
def test_producers_and_the_layer_itself_apply_its_input_rotation(model_type: str, online: bool) -> None:
    """For every input that a linear reads: (rotation of its producer, then its own at run time) = its fused one."""
    made = make(recipe=dataclasses.replace(PLAIN, online=online), family=FAMILIES[model_type])
    drawn, names = signs(made), FAMILIES[model_type]
    for index in range(made.blocks):
        block = f"{names.layers}.{index}."
        stream = made.online_residual or part(made, names.embedding).input
        assert made.online_residual is None or (online and SHAPE.tied)
        assert (stream is not None) == names.rotate_residual
        for reader in (names.query, names.key, names.value, names.gate, names.up):
            assert reader is None or part(made, block + reader).input == stream
        for writer in (names.attention_output, names.down):
            assert part(made, block + writer).output == stream
        found = by_role(made, index)
        if online or names.gate != names.up:  # fused rows that are treated alike are no parts
            assert found.keys() == ROLES - ({"gate"} if names.gate is None else set())
        assert all(linear.name == block + getattr(names, role) for role, linear in found.items() if role in ROLES)
        value, attention = found["value"], found["attention_output"]
        assert value.output is not None and attention.input is not None
        one_head = dataclasses.replace(value.output, size=SHAPE.head_dim)
        assert dataclasses.replace(attention.input, size=SHAPE.head_dim) == one_head
        check_down(found.get("up", part(made, block + names.up)), found["down"], drawn, online, names.gate is not None)
    if made.untied:
        assert part(made, names.head).input == stream
    if made.online_residual:
        assert made.online_residual == stream and made.linear(names.head) is None
        assert part(made, names.embedding).input is None and f"{names.final_norm}.weight" in made.kept


def check_down(up: LinearPlan, down: LinearPlan, drawn: rewrite.Signs, online: bool, gated: bool) -> None:
    if not online:
        assert (up.output, down.input, down.online) == (None, None, None)
        return
    if not gated:  # signs would not pass the activation
        assert up.output is None and down.input == down.online and down.online is not None and not down.online.signs
        return
    assert up.output is not None and down.input is not None and down.online is not None
    x = torch.randn(3, SHAPE.intermediate, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    produced = rewrite.rotate(x, up.output, drawn)
    torch.testing.assert_close(rewrite.rotate(produced, down.online, {}), rewrite.rotate(x, down.input, drawn))
    assert up.output.order == 1, "only signs go through act(gate) * up"


def test_norms_fold_where_the_stream_rotates_and_nowhere_else() -> None:
    made = make()
    assert part(made, "model.layers.1.self_attn.k_proj").norm == "model.layers.1.input_layernorm.weight"
    assert part(made, "model.layers.1.mlp.gate_proj").norm == "model.layers.1.post_attention_layernorm.weight"
    assert made.linear("lm_head") is None and made.kept == ("model.norm.weight",)  # tied
    assert len(made.unit_norms) == 4
    fused = make(recipe=dataclasses.replace(PLAIN, online=False))
    assert part(fused, "lm_head").norm == "model.norm.weight"
    assert len(fused.unit_norms) == 5 and not any("norm" in name for name in fused.kept)
    readers = {linear.norm for linear in made.linears if linear.norm}
    assert readers == set(made.unit_norms), "a gain that is written as one must go somewhere"


def test_linears_that_share_an_input_share_a_hessian() -> None:
    shared = [linear.statistics for linear in make().block(0)]
    assert [shared.count(name) for name in dict.fromkeys(shared)] == [3, 1, 2, 1]


# --- heads, families, widths, skip ----------------------------------------------------------------------------------


def test_a_tied_head_stays_tied_unless_nothing_may_run_online() -> None:
    kept = make()
    assert not kept.untied and kept.online_residual and kept.linear("lm_head") is None
    made = make(recipe=dataclasses.replace(PLAIN, online=False))
    assert made.untied and not made.online_residual
    assert part(made, "lm_head").source == "model.embed_tokens.weight"
    plain = make(recipe=dataclasses.replace(PLAIN, rotate=False))
    assert not plain.untied and plain.linear("lm_head") is None
    stored = make(dataclasses.replace(SHAPE, tied=False))
    assert not stored.untied and not stored.online_residual
    assert part(stored, "lm_head").source == "lm_head.weight"


def test_a_family_whose_residual_stream_must_not_turn() -> None:
    row = dataclasses.replace(FAMILIES["llama"], rotate_residual=False)
    made = make(family=row)
    check_claims(made, tensors(SHAPE))
    assert "R1" not in made.signs and made.unit_norms == () and not made.untied
    for linear in made.linears:
        assert linear.norm is None
        assert all(r is None or (r.signs or "").startswith(("R2", "R4")) for r in (linear.input, linear.output))
    assert part(made, "model.layers.0.mlp.down_proj").online is not None
    assert any("R1" in note for note in made.notes)


def test_without_rotation_nothing_turns() -> None:
    made = make(recipe=dataclasses.replace(PLAIN, rotate=False))
    assert made.signs == {} and made.notes == () and made.unit_norms == ()
    assert all((linear.input, linear.output, linear.online, linear.norm) == (None,) * 4 for linear in made.linears)


def test_widths_without_a_matrix_are_noted() -> None:
    shape = dataclasses.replace(SHAPE, tied=False)
    made = make(dataclasses.replace(shape, head_dim=18))
    (note,) = made.notes
    assert note.startswith("head_dim 18: ") and "9 " in note and " 2 " in note
    value = part(made, "model.layers.0.self_attn.v_proj").output
    assert value == Rotation(36, 2, "R2.0") and made.signs["R2.0"] == 18
    assert make(shape).notes == ()
    odd = make(dataclasses.replace(shape, intermediate=15), dataclasses.replace(PLAIN, online=False))
    assert odd.notes == (), "a width that nothing turns needs no note"


def test_skipped_linears_stay_plain_but_for_the_online_rotation() -> None:
    made = make(recipe=dataclasses.replace(PLAIN, skip=("*.down_proj", "model.layers.1.*")))
    kept = part(made, "model.layers.1.self_attn.q_proj")
    assert kept.format is None and kept.statistics is None and kept.input is not None
    dense = part(made, "model.layers.0.mlp.down_proj").format
    assert dense is not None and (dense.name, dense.options()) == ("dense", {"dtype": "float32"})
    rounded = part(made, "model.layers.0.mlp.up_proj").format
    assert rounded is not None and rounded.name == "quarot/integer"
    with pytest.raises(ptq.InputError, match="matches no linear"):
        make(recipe=dataclasses.replace(PLAIN, skip=("lm_head",)))


def test_the_cache_of_the_plan() -> None:
    """R3 is there where keys are cached in few bits and rotations may run with the model; it is in no weight."""

    def cache(**changes: Any) -> CacheQuantization | None:
        return make(recipe=dataclasses.replace(PLAIN, **changes)).cache

    assert cache() is None
    assert cache(key_bits=4, value_bits=3) == CacheQuantization(4, 3, 1.0, 0.95, 0, "paley1:19")
    for changes in (dict(rotate=False), dict(online=False)):
        assert cache(key_bits=4, **changes) == CacheQuantization(4, 16, 0.95, 1.0, 0, None)
    assert cache(value_bits=2, cache_clip=1.0, cache_sinks=4) == CacheQuantization(16, 2, 1.0, 1.0, 4, None)
    texts = dict(calibration="text.txt"), dict(), dict(calibration="text.txt", key_centers=False)
    centered = [cache(key_bits=4, **text) for text in texts]
    assert [found and found.centered for found in centered] == [True, False, False]
    plain, cached = make(), make(recipe=dataclasses.replace(PLAIN, key_bits=4))
    assert cached.notes == (WITHOUT_CENTERS,)
    unbalanced = tuple(
        dataclasses.replace(linear, balance=linear.balance if linear.role in ("up", "down") else None)
        for linear in cached.linears
    )
    assert dataclasses.replace(cached, cache=None, linears=unbalanced, notes=()) == plain
    assert "kv_cache" not in PtqConfig.of(plain).to_dict()
    content = PtqConfig.of(cached).to_dict()
    assert PtqConfig(**content).cache() == cached.cache and PtqConfig(**content).to_dict() == content


def test_groups_have_to_divide() -> None:
    with pytest.raises(ptq.InputError, match=r"down_proj: its 152 input channels .* groups of 40; try --group-size 8"):
        make(dataclasses.replace(SHAPE, hidden=80), dataclasses.replace(PLAIN, group_size=40))
    skipped = dataclasses.replace(PLAIN, group_size=9, skip=("*.o_proj", "*.down_proj"))
    assert part(make(recipe=skipped), "model.layers.0.mlp.up_proj").format is not None


@pytest.mark.parametrize("blocks", [1, 11])
def test_block_takes_the_linears_of_one_block(blocks: int) -> None:
    made = make(dataclasses.replace(SHAPE, blocks=blocks))
    names = [linear.name for index in range(blocks) for linear in made.block(index)]
    assert len(names) == len(set(names)) == 7 * blocks
    assert ["model.embed_tokens"] == [linear.name for linear in made.ends()]
