"""The table of model families: one row of tensor names per Hugging Face `model_type`.

A row says which tensor plays which part; how the parts act together (what reads and writes the residual stream, which
linears share an input) is the same for all of them and is said once, in `ptq.planning.outline` and in the methods'
planners. To add a family, add a row: docs/add-a-family.md. The tests in tests/test_families.py run over the whole
table.
"""

from dataclasses import replace
from typing import Any

from ptq.errors import InputError
from ptq.models.family import Experts, Family, LayerInputs, Mixer
from ptq.models.family_parts import (
    DELTA_NET,
    FUSED_DELTA_NET,
    GATED_ATTENTION,
    GATED_SHARED_EXPERT,
    GEMMA_4_ATTENTION,
    HEAD_NORMS,
    INDEXED_ATTENTION,
    LFM2,
    MAMBA2,
    MLA,
    NEMOTRON_H,
    OWN_KEYS,
    POST_NORMS,
    QKV,
    SHARED_EXPERTS,
)

FAMILIES: dict[str, Family] = {
    row.model_type: row
    for row in (
        *(
            Family(model_type)
            for model_type in (
                "llama",
                "mistral",
                "ministral",
                "ministral3",
                "qwen2",
                "smollm3",
                "granite",
                "seed_oss",
                "internlm3",
                "iquestcoder",
                "cwm",
            )
        ),
        Family("arcee", gate=None),
        Family(
            "apertus",
            attention_norm="attention_layernorm",
            mlp_norm="feedforward_layernorm",
            gate=None,
            kept=(*HEAD_NORMS, *(f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps"))),
        ),
        Family("nemotron", gate=None, norm_offset=1.0, rotate_residual=False),
        Family("jais2", gate=None, rotate_residual=False),
        Family("starcoder2", gate=None, up="mlp.c_fc", down="mlp.c_proj", rotate_residual=False),
        Family("stablelm", rotate_residual=False),
        Family("olmo", norm_tensors=False, rotate_residual=False),
        Family(
            "cohere",
            mlp_norm="input_layernorm",
            kept=HEAD_NORMS,
            kept_if="use_qk_norm",
            rope_interleaved=True,
            rotate_residual=False,
        ),
        Family("cohere2", mlp_norm="input_layernorm", rope_interleaved=True, rotate_residual=False),
        Family(
            "phi",
            final_norm="model.final_layernorm",
            attention_output="self_attn.dense",
            mlp_norm="input_layernorm",
            gate=None,
            up="mlp.fc1",
            down="mlp.fc2",
            rotate_residual=False,
        ),
        Family("granite_swa", kept=("self_attn.sinks",), plain_attention=False),
        *(Family(model_type, rope_interleaved=True) for model_type in ("ernie4_5", "helium")),
        Family("qwen3", kept=HEAD_NORMS),
        Family("hunyuan_v1_dense", kept=("self_attn.query_layernorm.weight", "self_attn.key_layernorm.weight")),
        *(
            Family(
                model_type,
                attention_norm=None,
                mlp_norm=None,
                kept=(*HEAD_NORMS, *POST_NORMS),
                rotate_residual=False,
            )
            for model_type in ("olmo2", "olmo3", "exaone4")
        ),
        Family("hyperclovax", kept=("post_norm1.weight", "post_norm2.weight"), rotate_residual=False),
        Family(
            "phi3",
            query="self_attn.qkv_proj",
            key="self_attn.qkv_proj",
            value="self_attn.qkv_proj",
            gate="mlp.gate_up_proj",
            up="mlp.gate_up_proj",
        ),
        Family("glm", gate="mlp.gate_up_proj", up="mlp.gate_up_proj", rope_interleaved=True),
        Family(
            "glm4",
            gate="mlp.gate_up_proj",
            up="mlp.gate_up_proj",
            kept=("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"),
            rope_interleaved=True,
            rotate_residual=False,
        ),
        Family("gemma", norm_offset=1.0),
        Family("vaultgemma", mlp_norm="pre_feedforward_layernorm", norm_offset=1.0),
        Family(
            "gemma2",
            mlp_norm="pre_feedforward_layernorm",
            kept=POST_NORMS,
            norm_offset=1.0,
            rotate_residual=False,
        ),
        Family(
            "gemma3_text",
            mlp_norm="pre_feedforward_layernorm",
            kept=(*HEAD_NORMS, *POST_NORMS),
            norm_offset=1.0,
            rotate_residual=False,
        ),
        Family(
            "gemma4_text",
            mlp_norm="pre_feedforward_layernorm",
            kept=(*POST_NORMS, "layer_scalar"),
            rotate_residual=False,
            mixers=GEMMA_4_ATTENTION,
            own_keys=OWN_KEYS,
            layer_inputs=LayerInputs(),
            experts=Experts(
                "router.proj",
                "experts",
                shared="mlp",
                kept=(
                    "router.scale",
                    "router.per_expert_scale",
                    "pre_feedforward_layernorm_2.weight",
                    "post_feedforward_layernorm_1.weight",
                    "post_feedforward_layernorm_2.weight",
                ),
                fused=True,
            ),
        ),
        *(Family(model_type, kept=HEAD_NORMS, experts=Experts()) for model_type in ("qwen3_moe", "olmoe", "mellum")),
        Family(
            "flex_olmo",
            attention_norm=None,
            mlp_norm=None,
            kept=(*HEAD_NORMS, *POST_NORMS),
            rotate_residual=False,
            experts=Experts(),
        ),
        Family("qwen2_moe", experts=GATED_SHARED_EXPERT),
        Family("glm4_moe", kept=HEAD_NORMS, kept_if="use_qk_norm", experts=SHARED_EXPERTS),
        Family(
            "ernie4_5_moe",
            rope_interleaved=True,
            experts=Experts(shared="mlp.shared_experts", kept=("mlp.moe_statics.e_score_correction_bias",)),
        ),
        Family(
            "hunyuan_v1_moe",
            kept=("self_attn.query_layernorm.weight", "self_attn.key_layernorm.weight"),
            experts=Experts("mlp.gate.wg", shared="mlp.shared_mlp"),
        ),
        Family(
            "afmoe",
            mlp_norm="pre_mlp_layernorm",
            kept=("post_attention_layernorm.weight", "post_mlp_layernorm.weight"),
            rotate_residual=False,
            mixers=(replace(GATED_ATTENTION, readers=(*QKV, "self_attn.gate_proj")),),
            experts=Experts("mlp.router.gate", shared="mlp.shared_experts", kept=("mlp.expert_bias",)),
        ),
        Family("dots1", kept=HEAD_NORMS, experts=SHARED_EXPERTS),
        Family("solar_open", experts=SHARED_EXPERTS),
        Family(
            "mixtral",
            experts=Experts("block_sparse_moe.gate", "block_sparse_moe.experts", gate="w1", up="w3", down="w2"),
        ),
        Family(
            "gpt_oss",
            kept=("self_attn.sinks",),
            plain_attention=False,
            experts=Experts("mlp.router", fused=True, transposed=True, interleaved=True, plain_gate=False),
        ),
        Family(
            "minimax_m2",
            kept=HEAD_NORMS,
            experts=Experts(
                "block_sparse_moe.gate",
                "block_sparse_moe.experts",
                gate="w1",
                up="w3",
                down="w2",
                kept=("block_sparse_moe.e_score_correction_bias",),
            ),
        ),
        Family(
            "qwen3_next",
            norm_offset=1.0,
            mixers=(FUSED_DELTA_NET, GATED_ATTENTION),
            experts=GATED_SHARED_EXPERT,
        ),
        Family("qwen3_5_text", norm_offset=1.0, mixers=(DELTA_NET, GATED_ATTENTION)),
        Family(
            "qwen3_5_moe_text",
            norm_offset=1.0,
            mixers=(DELTA_NET, GATED_ATTENTION),
            experts=GATED_SHARED_EXPERT,
        ),
        *(Family(model_type, mixers=MLA) for model_type in ("minicpm3", "youtu")),
        *(Family(model_type, mixers=MLA, experts=SHARED_EXPERTS) for model_type in ("deepseek_v3", "glm4_moe_lite")),
        Family("deepseek_v2", mixers=MLA, experts=Experts(shared="mlp.shared_experts")),
        Family("deepseek_v32", mixers=(INDEXED_ATTENTION,), experts=SHARED_EXPERTS),
        Family("glm_moe_dsa", mixers=(INDEXED_ATTENTION,), experts=SHARED_EXPERTS, returns_pair=True),
        Family("lfm2", **LFM2),
        Family(
            "lfm2_moe",
            **LFM2,
            experts=Experts(
                "feed_forward.gate",
                "feed_forward.experts",
                gate="w1",
                up="w3",
                down="w2",
                kept=("feed_forward.expert_bias",),
            ),
        ),
        Family(
            "bamba",
            final_norm="model.final_layernorm",
            mlp_norm="pre_ff_layernorm",
            gate="feed_forward.gate_proj",
            up="feed_forward.up_proj",
            down="feed_forward.down_proj",
            returns_pair=True,
            mixers=(MAMBA2,),
        ),
        Family("nemotron_h", **NEMOTRON_H),
        Family(
            "gpt_neox",
            layers="gpt_neox.layers",
            embedding="gpt_neox.embed_in",
            final_norm="gpt_neox.final_layer_norm",
            head="embed_out",
            gate=None,
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
            rotate_residual=False,
            unused=tuple(f"attention.{name}" for name in ("rotary_emb.inv_freq", "bias", "masked_bias")),
            mixers=(Mixer(("attention.query_key_value",), "attention.dense"),),
        ),
        Family(
            "granitemoehybrid",
            gate="shared_mlp.input_linear",
            up="shared_mlp.input_linear",
            down="shared_mlp.output_linear",
            mixers=(MAMBA2,),
        ),
    )
}

FOR_TEXT = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
"""Models that also read images, with text models of types of their own, and what these are for text alone."""


def check_generates(config: dict[str, Any]) -> None:
    """Raise InputError for a classifier, and for a model without a head, as models that embed texts are published."""
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if str(name).endswith(("Classification", "QuestionAnswering", "Model")):
            raise InputError(f"config.json: architectures says {name!r}: only models that generate text are supported")


def family_of(config: dict[str, Any]) -> Family:
    """The row of a model. Raises InputError for a `model_type` that has none."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise InputError(
            f"config.json: model_type {model_type!r} is not supported; known are {', '.join(sorted(FAMILIES))}. "
            "A new one is a row of ptq/models/families.py: see docs/add-a-family.md"
        )
    return FAMILIES[model_type]
