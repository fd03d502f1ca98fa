"""Rows of the table of model families (`ptq.models.families`): models with experts in some blocks, or in all."""

from dataclasses import replace

from ptq.models.family import ExpertNames, Family
from ptq.models.family_parts import (
    GATED_SHARED_EXPERT,
    GRANITE_EXPERTS,
    GRANITE_MOE,
    HEAD_NORMS,
    MIXTRAL,
    MIXTRAL_EXPERTS,
    POST_NORMS,
    SHARED_EXPERTS,
)

ROWS = (
    *(Family(model_type, kept=HEAD_NORMS, experts=ExpertNames()) for model_type in ("qwen3_moe", "olmoe", "mellum")),
    Family(
        "flex_olmo",
        attention_norm=None,
        mlp_norm=None,
        kept=(*HEAD_NORMS, *POST_NORMS),
        rotate_residual=False,
        experts=ExpertNames(),
    ),
    Family("qwen2_moe", experts=GATED_SHARED_EXPERT),
    Family(
        "flint",
        kept=(*HEAD_NORMS, "self_attn.softmax_offset"),
        plain_attention=False,
        renamed=(("self_attn.softmax_offset", "self_attn.sinks"),),
        experts=ExpertNames(shared="mlp.shared_expert"),
    ),
    Family(
        "kolibri1",
        kept=(*HEAD_NORMS, "post_attn_norm.weight", "post_ffn_norm.weight"),
        rotate_residual=False,
        renamed=(
            ("moe.router.expert_bias", "mlp.gate.e_score_correction_bias"),
            ("post_attn_norm", "post_self_attn_layernorm"),
            ("post_ffn_norm", "post_mlp_layernorm"),
        ),
        experts=replace(SHARED_EXPERTS, kept=("moe.router.expert_bias",)),
    ),
    Family("glm4_moe", kept=HEAD_NORMS, kept_if="use_qk_norm", experts=SHARED_EXPERTS),
    Family(
        "sarvam_moe",
        kept=HEAD_NORMS,
        kept_if="use_qk_norm",
        published=(
            ("word_embeddings", "embed_tokens"),
            ("attention.dense", "self_attn.o_proj"),
            ("attention.query_layernorm", "self_attn.q_norm"),
            ("attention.key_layernorm", "self_attn.k_norm"),
            ("attention", "self_attn"),
            ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
        ),
        joined="self_attn.query_key_value",
        experts=SHARED_EXPERTS,
    ),
    Family(
        "ernie4_5_moe",
        rope_interleaved=True,
        renamed=(("mlp.moe_statics", "mlp.gate.moe_statics"),),
        experts=ExpertNames(shared="mlp.shared_experts", kept=("mlp.moe_statics.e_score_correction_bias",)),
    ),
    Family(
        "hunyuan_v1_moe",
        kept=("self_attn.query_layernorm.weight", "self_attn.key_layernorm.weight"),
        experts=ExpertNames("mlp.gate.wg", shared="mlp.shared_mlp"),
    ),
    Family("dots1", kept=HEAD_NORMS, experts=SHARED_EXPERTS),
    Family("solar_open", experts=SHARED_EXPERTS),
    Family("mixtral", **MIXTRAL),
    Family(
        "gpt_oss",
        kept=("self_attn.sinks",),
        plain_attention=False,
        experts=ExpertNames("mlp.router", fused=True, transposed=True, interleaved=True, plain_gate=False),
    ),
    Family(
        "llama4_text",
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        kept_if="use_qk_norm",
        plain_key_norm=True,
        rope_interleaved=True,
        experts=ExpertNames(
            "feed_forward.router",
            "feed_forward.experts",
            shared="feed_forward.shared_expert",
            fused=True,
            transposed=True,
            logits=1,
        ),
    ),
    Family(
        "minimax_m2",
        kept=HEAD_NORMS,
        renamed=MIXTRAL["renamed"],
        experts=replace(MIXTRAL_EXPERTS, kept=("block_sparse_moe.e_score_correction_bias",)),
    ),
    Family(
        "cohere2_moe",
        mlp_norm="input_layernorm",
        rope_interleaved=True,
        rotate_residual=False,
        experts=ExpertNames(shared="mlp.shared_experts"),
    ),
    Family(
        "exaone_moe",
        kept=HEAD_NORMS,
        renamed=(("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),),
        experts=ExpertNames(shared="mlp.shared_experts", kept=("mlp.e_score_correction_bias",)),
    ),
    Family(
        "hy_v3",
        kept=HEAD_NORMS,
        renamed=(
            ("mlp.router.gate", "mlp.gate"),
            ("mlp.expert_bias", "mlp.e_score_correction_bias"),
            ("mlp.shared_mlp", "mlp.shared_experts"),
        ),
        experts=ExpertNames("mlp.router.gate", shared="mlp.shared_mlp", kept=("mlp.expert_bias",)),
    ),
    Family(
        "phimoe",
        rotate_residual=False,
        renamed=(("block_sparse_moe.gate", "block_sparse_moe.router"), *MIXTRAL["renamed"]),
        experts=MIXTRAL_EXPERTS,
    ),
    Family(
        "granitemoe_swa",
        kept=("self_attn.sinks",),
        plain_attention=False,
        experts=replace(GRANITE_EXPERTS, router="block_sparse_moe.router", shared=None),
    ),
    *(Family(model_type, **GRANITE_MOE) for model_type in ("granitemoe", "granitemoeshared")),
)
