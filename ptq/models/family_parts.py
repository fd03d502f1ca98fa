"""Parts that several rows of the table of model families have in common (`ptq.models.families`)."""

from dataclasses import replace
from typing import Any

from ptq.models.family import ExpertNames, Mixer

HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
POST_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")

GATED_SHARED_EXPERT = ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
SHARED_EXPERTS = ExpertNames(shared="mlp.shared_experts", kept=("mlp.gate.e_score_correction_bias",))

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
HEAD_GATED_MLA = tuple(replace(mixer, gates=("self_attn.g_proj",)) for mixer in MLA)
INDEXED_ATTENTION = replace(
    LATENT_ATTENTION,
    gates=("self_attn.indexer.wk", "self_attn.indexer.weights_proj"),
    kept=(
        *LATENT_ATTENTION.kept,
        *(f"self_attn.indexer.{name}" for name in ("wq_b.weight", "k_norm.weight", "k_norm.bias")),
    ),
)
"""MLA over the tokens that an indexer chooses. The indexer stays in 16 bits."""
KIMI_DELTA = Mixer(
    readers=("self_attn.f_a_proj", "self_attn.g_a_proj", *QKV),
    output="self_attn.o_proj",
    inside=("self_attn.f_b_proj", "self_attn.g_b_proj"),
    gates=("self_attn.b_proj",),
    kept=tuple(f"self_attn.{name}" for name in ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight")),
)
"""Kimi Delta Attention: gated DeltaNet with a decay for every channel. Decays and gates are products of low rank."""
FULL_KIMI_DELTA = replace(KIMI_DELTA, readers=("self_attn.f_proj", "self_attn.g_proj", *QKV), inside=())
"""The same with matrices of full rank."""
FORGET_GATE = tuple(
    (f"self_attn.{name}", f"self_attn.forget_gate.{name}")
    for name in ("f_a_proj", "f_b_proj", "f_proj", "dt_bias", "A_log")
)
"""What makes the decays, in files and in the model."""
STACKED_CONVOLUTIONS = (("self_attn.conv1d.weight", tuple(f"self_attn.{part}_conv1d.weight" for part in "qkv")),)
GATED_NORM_PARTS = ("norm.weight", "W_down.weight", "W_up.weight")
"""Of a norm whose output is multiplied with a gate of low rank."""
OWN_KEYS = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")
GEMMA_4_ATTENTION = (
    replace(GATED_ATTENTION, readers=("self_attn.v_proj", "self_attn.k_proj", "self_attn.q_proj")),
    replace(GATED_ATTENTION, readers=("self_attn.k_proj", "self_attn.q_proj")),
    replace(GATED_ATTENTION, readers=("self_attn.q_proj",), kept=("self_attn.q_norm.weight",)),
)
"""Values are normed; some blocks take keys for values, others keys and values of an earlier block."""
GEMMA_4: dict[str, Any] = dict(
    mlp_norm="pre_feedforward_layernorm",
    kept=(*POST_NORMS, "layer_scalar"),
    rotate_residual=False,
    mixers=GEMMA_4_ATTENTION,
    own_keys=OWN_KEYS,
    needs_bos=True,
)
"""Fields of both rows of Gemma 4."""
FEED_FORWARD: dict[str, Any] = dict(
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
)
"""Fields of the rows of Bamba, Jamba and Falcon H1."""
MAMBA = Mixer(
    readers=("mamba.in_proj",),
    output="mamba.out_proj",
    inside=("mamba.x_proj",),
    kept=(
        *(f"mamba.{name}" for name in ("conv1d.weight", "A_log", "D", "dt_proj.weight", "dt_proj.bias")),
        *(f"mamba.{name}_layernorm.weight" for name in ("dt", "b", "c")),
    ),
    optional=("mamba.conv1d.bias",),
)
"""Mamba with norms, as Jamba has it. Its model reads the weight of dt_proj, of few columns, by itself."""
MAMBA2 = Mixer(
    readers=("mamba.in_proj",),
    output="mamba.out_proj",
    kept=tuple(f"mamba.{name}" for name in ("conv1d.weight", "A_log", "D", "dt_bias", "norm.weight")),
    optional=("mamba.conv1d.bias",),
)
MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", gate="w1", up="w3", down="w2")
MIXTRAL: dict[str, Any] = dict(renamed=(("block_sparse_moe", "mlp"),), experts=MIXTRAL_EXPERTS)
"""Fields of the rows of Mixtral, and of others with its names."""
LFM2: dict[str, Any] = dict(
    final_norm="model.embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    mixers=(
        Mixer(("conv.in_proj",), "conv.out_proj", kept=("conv.conv.weight",), optional=("conv.conv.bias",)),
        Mixer(QKV, "self_attn.out_proj", kept=("self_attn.q_layernorm.weight", "self_attn.k_layernorm.weight")),
    ),
)
"""Fields of both rows of LFM 2."""
GRANITE_EXPERTS = ExpertNames(
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
