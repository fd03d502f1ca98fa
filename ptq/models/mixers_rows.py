"""Rows of the table of model families (`ptq.models.families`): models some of whose blocks, or all, do not have plain
attention."""

from dataclasses import replace
from typing import Any

from ptq.models.family import ExpertNames, Family, LayerInputs, Mixer
from ptq.models.family_parts import (
    DELTA_NET,
    FEED_FORWARD,
    FORGET_GATE,
    FULL_KIMI_DELTA,
    FUSED_DELTA_NET,
    GATED_ATTENTION,
    GATED_NORM_PARTS,
    GATED_SHARED_EXPERT,
    GEMMA_4,
    GRANITE_MOE,
    HEAD_GATED_MLA,
    HEAD_NORMS,
    INDEXED_ATTENTION,
    KIMI_DELTA,
    LFM2,
    MAMBA,
    MAMBA2,
    MIXTRAL,
    MIXTRAL_EXPERTS,
    MLA,
    QKV,
    SHARED_EXPERTS,
    STACKED_CONVOLUTIONS,
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
    Family("mistral4", mixers=MLA, experts=ExpertNames(shared="mlp.shared_experts", fused=True)),
    Family(
        "kimi_linear",
        gate="block_sparse_moe.gate_proj",
        up="block_sparse_moe.up_proj",
        down="block_sparse_moe.down_proj",
        mixers=(KIMI_DELTA, *MLA),
        renamed=(*FORGET_GATE, *MIXTRAL["renamed"]),
        stacked=STACKED_CONVOLUTIONS,
        experts=replace(
            MIXTRAL_EXPERTS,
            shared="block_sparse_moe.shared_experts",
            shared_linears=("gate_proj", "up_proj", "down_proj"),
            kept=("block_sparse_moe.gate.e_score_correction_bias",),
        ),
    ),
    Family(
        "bailing_hybrid",
        mixers=(FULL_KIMI_DELTA, *HEAD_GATED_MLA),
        renamed=FORGET_GATE,
        published=(
            ("word_embeddings", "embed_tokens"),
            ("attention.dense", "self_attn.o_proj"),
            ("attention", "self_attn"),
            ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
        ),
        stacked=STACKED_CONVOLUTIONS,
        experts=SHARED_EXPERTS,
    ),
    Family(
        "olmo_hybrid",
        attention_norm=None,
        mlp_norm=None,
        rotate_residual=False,
        kept=("feedforward_layer_norm.weight",),
        renamed=(("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm")),
        mixers=(
            Mixer(
                tuple(f"linear_attn.{name}_proj" for name in "qkvg"),
                "linear_attn.o_proj",
                gates=("linear_attn.a_proj", "linear_attn.b_proj"),
                kept=(
                    *(f"linear_attn.{name}" for name in ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight")),
                    "attention_layer_norm.weight",
                ),
            ),
            Mixer(QKV, "self_attn.o_proj", kept=(*HEAD_NORMS, "post_feedforward_layernorm.weight")),
        ),
        stacked=(("linear_attn.conv1d.weight", tuple(f"linear_attn.{part}_conv1d.weight" for part in "qkv")),),
    ),
    Family(
        "axk1",
        mixers=MLA,
        rotate_residual=False,
        renamed=(("post_mlp_layernorm", "mlp.post_mlp_layernorm"),),
        experts=replace(SHARED_EXPERTS, kept=(*SHARED_EXPERTS.kept, "post_mlp_layernorm.weight")),
    ),
    Family(  # norms have gates of low rank, but those of MLPs without experts
        "axk2",
        attention_norm=None,
        mlp_norm=None,
        rotate_residual=False,
        mixers=(
            replace(
                INDEXED_ATTENTION,
                kept=(*INDEXED_ATTENTION.kept, *(f"input_layernorm.{part}" for part in GATED_NORM_PARTS)),
                optional=(
                    "post_attention_layernorm.weight",
                    *(f"post_attention_layernorm.{part}" for part in GATED_NORM_PARTS),
                ),
            ),
        ),
        renamed=(("W_down", "mlp.fc1"), ("W_up", "mlp.fc2"), ("self_attn.q_b_proj", "self_attn.q_gate_proj")),
        experts=SHARED_EXPERTS,
    ),
    Family(
        "diffllama",
        mixers=(Mixer(QKV, "self_attn.o_proj", kept=tuple(f"self_attn.lambda_{x}{i}" for x in "qk" for i in "12")),),
    ),
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
