"""Parts that several rows of the table of model families have in common (`ptq.models.families`)."""

from dataclasses import replace
from typing import Any

from ptq.models.family import Experts, Mixer

HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
POST_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")

GATED_SHARED_EXPERT = Experts(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
SHARED_EXPERTS = Experts(shared="mlp.shared_experts", kept=("mlp.gate.e_score_correction_bias",))

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED_ATTENTION = Mixer(QKV, "self_attn.o_proj", kept=HEAD_NORMS)
"""What attention gives is multiplied with a gate for each channel; the gates are rows of q_proj, too."""
DELTA_NET = Mixer(
    readers=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    output="linear_attn.out_proj",
    gates=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    kept=tuple(f"linear_attn.{name}" for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight")),
)
"""Gated DeltaNet, a linear attention."""
FUSED_DELTA_NET = replace(DELTA_NET, readers=("linear_attn.in_proj_qkvz",), gates=("linear_attn.in_proj_ba",))
LATENT_ATTENTION = Mixer(
    readers=("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    output="self_attn.o_proj",
    inside=("self_attn.q_b_proj", "self_attn.kv_b_proj"),
    kept=("self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
)
"""Multi-head latent attention (MLA) with queries of low rank."""
FULL_QUERIES = Mixer(
    readers=("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"),
    output="self_attn.o_proj",
    inside=("self_attn.kv_b_proj",),
    kept=("self_attn.kv_a_layernorm.weight",),
)
"""MLA with queries from one full matrix."""
MLA = (LATENT_ATTENTION, FULL_QUERIES)
INDEXED_ATTENTION = replace(
    LATENT_ATTENTION,
    gates=("self_attn.indexer.wk", "self_attn.indexer.weights_proj"),
    kept=(
        *LATENT_ATTENTION.kept,
        *(f"self_attn.indexer.{name}" for name in ("wq_b.weight", "k_norm.weight", "k_norm.bias")),
    ),
)
"""MLA over the tokens that an indexer chooses. The indexer stays in 16 bits."""
OWN_KEYS = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")
GEMMA_4_ATTENTION = (
    replace(GATED_ATTENTION, readers=("self_attn.v_proj", "self_attn.k_proj", "self_attn.q_proj")),
    replace(GATED_ATTENTION, readers=("self_attn.k_proj", "self_attn.q_proj")),
    replace(GATED_ATTENTION, readers=("self_attn.q_proj",), kept=("self_attn.q_norm.weight",)),
)
"""Values are normed; some blocks take keys for values, others keys and values of an earlier block."""
MAMBA2 = Mixer(
    readers=("mamba.in_proj",),
    output="mamba.out_proj",
    kept=tuple(f"mamba.{name}" for name in ("conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias", "norm.weight")),
)
SPARSE_MOE = (("block_sparse_moe", "mlp"),)
NEMOTRON_H: dict[str, Any] = dict(
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
        replace(
            MAMBA2,
            readers=("mixer.in_proj",),
            output="mixer.out_proj",
            kept=tuple(name.replace("mamba", "mixer") for name in MAMBA2.kept),
        ),
    ),
    experts=Experts(
        "mixer.gate",
        "mixer.experts",
        gate=None,
        shared="mixer.shared_experts",
        latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
        kept=("mixer.gate.e_score_correction_bias",),
    ),
)
"""Fields of its row. A block is one thing alone: attention, a state space, an MLP or experts."""
LFM2: dict[str, Any] = dict(
    final_norm="model.embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    mixers=(
        Mixer(("conv.in_proj",), "conv.out_proj", kept=("conv.conv.weight", "conv.conv.bias")),
        Mixer(QKV, "self_attn.out_proj", kept=("self_attn.q_layernorm.weight", "self_attn.k_layernorm.weight")),
    ),
)
"""Fields of both rows of LFM 2."""
LFM3: dict[str, Any] = dict(
    LFM2,
    kept=("post_operator_norm.weight", "post_ffn_norm.weight"),
    kept_if="use_sandwich_norm",
    rotate_residual=False,
    mixers=(
        LFM2["mixers"][0],
        Mixer(QKV, "self_attn.o_proj", gates=("self_attn.gate_proj",), kept=HEAD_NORMS),
    ),
    renamed=(("self_attn.gate_proj", "self_attn.g_proj"),),
)
GRANITE_EXPERTS = Experts(
    "block_sparse_moe.router.layer",
    "block_sparse_moe.experts",
    shared="shared_mlp",
    shared_linears=("input_linear", "input_linear", "output_linear"),
    fused=True,
)
GRANITE_MOE: dict[str, Any] = dict(
    gate="shared_mlp.input_linear",
    up="shared_mlp.input_linear",
    down="shared_mlp.output_linear",
    renamed=(("block_sparse_moe.router.layer", "block_sparse_moe.router"),),
    published=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    ),
    experts=GRANITE_EXPERTS,
)
"""Fields of the rows of Granite 3 and 4 with experts. A config may leave out the shared MLP, or the experts."""
