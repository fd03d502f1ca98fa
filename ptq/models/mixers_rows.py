"""Rows of the table of model families (`ptq.models.families`): models some of whose blocks, or all, do not have plain
attention."""

from dataclasses import replace
from typing import Any

from ptq.models.family import ExpertNames, Family, LayerInputs, Mixer
from ptq.models.family_parts import (
    DELTA_NET,
    FEED_FORWARD,
    FUSED_DELTA_NET,
    GATED_ATTENTION,
    GATED_SHARED_EXPERT,
    GEMMA_4,
    GRANITE_MOE,
    HEAD_NORMS,
    INDEXED_ATTENTION,
    LFM2,
    MAMBA,
    MAMBA2,
    MIXTRAL,
    MLA,
    QKV,
    SHARED_EXPERTS,
)

ROWS = (
    Family(
        "gemma4_text",
        **GEMMA_4,
        layer_inputs=LayerInputs(),
        experts=ExpertNames(
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
    Family("gemma4_unified_text", **GEMMA_4),
    Family(
        "afmoe",
        mlp_norm="pre_mlp_layernorm",
        kept=("post_attention_layernorm.weight", "post_mlp_layernorm.weight"),
        rotate_residual=False,
        mixers=(replace(GATED_ATTENTION, readers=(*QKV, "self_attn.gate_proj")),),
        experts=ExpertNames("mlp.router.gate", shared="mlp.shared_experts", kept=("mlp.expert_bias",)),
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
    *(
        Family(model_type, mixers=MLA, experts=SHARED_EXPERTS)
        for model_type in ("deepseek_v3", "glm4_moe_lite", "sarvam_mla")
    ),
    Family(
        "jamba",
        **FEED_FORWARD,
        mixers=(MAMBA,),
        experts=ExpertNames("feed_forward.router", "feed_forward.experts"),
    ),
    Family(
        "falcon_h1",
        **FEED_FORWARD,
        returns_pair=True,
        mixers=(replace(MAMBA2, kept=MAMBA2.kept[:-1], optional=(*MAMBA2.optional, "mamba.norm.weight"), beside=True),),
    ),
    Family("deepseek_v2", mixers=MLA, experts=ExpertNames(shared="mlp.shared_experts")),
    Family("deepseek_v32", mixers=(INDEXED_ATTENTION,), experts=SHARED_EXPERTS),
    Family("glm_moe_dsa", mixers=(INDEXED_ATTENTION,), experts=SHARED_EXPERTS, returns_pair=True),
    Family("lfm2", **LFM2),
    Family(
        "lfm2_moe",
        **LFM2,
        experts=ExpertNames(
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
        **FEED_FORWARD,
        returns_pair=True,
        mixers=(MAMBA2,),
    ),
    Family(  # a block is one thing alone: attention, a state space, an MLP or experts
        "nemotron_h",
        published=(("backbone", "model"),),
        embedding="model.embeddings",
        final_norm="model.norm_f",
        attention_norm="norm",
        query="mixer.q_proj",
        key="mixer.k_proj",
        value="mixer.v_proj",
        attention_output="mixer.o_proj",
        mlp_norm="norm",
        gate=None,
        up="mixer.up_proj",
        down="mixer.down_proj",
        mixers=(
            Mixer(
                ("mixer.in_proj",),
                "mixer.out_proj",
                kept=tuple(name.replace("mamba", "mixer") for name in MAMBA2.kept),
                optional=("mixer.conv1d.bias",),
            ),
        ),
        experts=ExpertNames(
            "mixer.gate",
            "mixer.experts",
            gate=None,
            shared="mixer.shared_experts",
            latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
            kept=("mixer.gate.e_score_correction_bias",),
        ),
    ),
    Family(
        "gpt_neox",
        layers="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
        renamed=(("embed_out", "lm_head"),),
        gate=None,
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        rotate_residual=False,
        unused=tuple(f"attention.{name}" for name in ("rotary_emb.inv_freq", "bias", "masked_bias")),
        mixers=(Mixer(("attention.query_key_value",), "attention.dense"),),
    ),
    Family("granitemoehybrid", **GRANITE_MOE, mixers=(MAMBA2,)),
    Family(
        "minimax",
        rotate_residual=False,
        mixers=(
            Mixer(
                ("self_attn.qkv_proj", "self_attn.output_gate"),
                "self_attn.out_proj",
                kept=tuple(
                    f"self_attn.{name}"
                    for name in ("norm.weight", "slope_rate", "query_decay", "key_decay", "diagonal_decay")
                ),
            ),
        ),
        **MIXTRAL,
    ),
    Family(
        "laguna",
        mixers=(Mixer(QKV, "self_attn.o_proj", gates=("self_attn.g_proj",), kept=HEAD_NORMS),),
        renamed=(
            ("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
            ("mlp.shared_expert", "mlp.shared_experts"),
        ),
        experts=ExpertNames(shared="mlp.shared_expert", kept=("mlp.experts.e_score_correction_bias",)),
    ),
    Family(
        "lfm3",
        **dict[str, Any](
            LFM2,
            kept=("post_operator_norm.weight", "post_ffn_norm.weight"),
            kept_if="use_sandwich_norm",
            rotate_residual=False,
            mixers=(
                LFM2["mixers"][0],
                Mixer(QKV, "self_attn.o_proj", gates=("self_attn.gate_proj",), kept=HEAD_NORMS),
            ),
            renamed=(("self_attn.gate_proj", "self_attn.g_proj"),),
        ),
    ),
    Family(
        "mimo_v2_flash",
        mixers=(Mixer(QKV, "self_attn.o_proj", optional=("self_attn.attention_sink_bias",)),),
        renamed=(("self_attn.attention_sink_bias", "self_attn.sinks"),),
        experts=ExpertNames(kept=("mlp.gate.e_score_correction_bias",)),
    ),
)
