"""The table of model families: one row of tensor names per Hugging Face `model_type`.

A row says which tensor plays which part; how the parts act together (what reads and writes the residual stream, which
linears share an input) is the same for all of them and is said once, in `ptq.outline` and in the methods' planners.
To add a family, add a row: docs/add-a-family.md. The tests in tests/test_families.py run over the whole table.
"""

from dataclasses import dataclass, replace
from typing import Any

from ptq.errors import InputError


@dataclass(frozen=True)
class Experts:
    """Names of the parts of a mixture of experts in the files of a checkpoint, relative to the block.

    Expert e is the gated MLP `<experts>.<e>.<gate>` and so on; the router is a matrix with a row for every expert. What
    the model makes of its product with a token is the model's own affair.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str | None = None
    """The gated MLP beside them, which every token passes; None where there is none."""
    shared_gate: str | None = None
    """The linear of one row that says how much the shared MLP counts for a token; None where it always counts as 1."""
    kept: tuple[str, ...] = ()
    """Other tensors of a block with experts, such as what is added to the router's scores before the choice."""

    @property
    def linears(self) -> tuple[str, str, str]:
        """What gate, up and down are called inside an expert."""
        return self.gate, self.up, self.down


@dataclass(frozen=True)
class Family:
    """Names of the parts of a decoder-only model: RMSNorm, rotary attention, gated MLP.

    Names of parts inside a block are relative to the block. The defaults are those of Llama. Query, key and value, and
    gate and up, may name the same linear: a fused one, whose rows stand in this order.
    """

    model_type: str
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str | None = "input_layernorm"
    """The norm whose output query, key and value read; None where they read the residual stream itself."""
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    attention_output: str = "self_attn.o_proj"
    mlp_norm: str | None = "post_attention_layernorm"
    """The norm whose output gate and up read; None where they read the residual stream itself."""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    kept: tuple[str, ...] = ()
    """Other tensors of a block, which no rotation touches: q_norm and k_norm have gains per head and stay."""
    kept_if: str | None = None
    """The setting of config.json without which a model of the family has no `kept`; None: it always has."""
    norm_offset: float = 0.0
    """What norms add to their stored gain: 1 for Gemma, which stores g - 1."""
    rope_interleaved: bool = False
    """RoPE turns channels 2 i and 2 i + 1 of a head together; False: i and i + d / 2 of the d that it turns."""
    rotate_residual: bool = True
    """False where something acts on a block's output before it is added, such as a norm with a gain: R1 is invalid."""
    plain_attention: bool = True
    """False where attention is more than softmax(q k + mask) v, such as sinks that are learned: no packed KV cache."""
    unused: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    """Tensors of a block that old checkpoints carry and no model reads."""
    experts: Experts | None = None
    """What the blocks with experts have in the place of gate, up and down; None where no block has any."""

    def of(self, config: Any) -> "Family":
        """The row as a model with this transformers config has it."""
        return self if self.kept_if is None or getattr(config, self.kept_if) else replace(self, kept=())

    @property
    def norms_keys(self) -> bool:
        """Whether keys are normed, before RoPE or after it: scales of their channels would vanish, or do harm."""
        return any(name.endswith((".k_norm.weight", ".key_layernorm.weight")) for name in self.kept)


HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
POST_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")

SHARED_EXPERTS = Experts(shared="mlp.shared_experts", kept=("mlp.gate.e_score_correction_bias",))

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
        *(Family(model_type, kept=HEAD_NORMS, experts=Experts()) for model_type in ("qwen3_moe", "olmoe", "mellum")),
        Family(
            "flex_olmo",
            attention_norm=None,
            mlp_norm=None,
            kept=(*HEAD_NORMS, *POST_NORMS),
            rotate_residual=False,
            experts=Experts(),
        ),
        Family("qwen2_moe", experts=Experts(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")),
        Family("glm4_moe", kept=HEAD_NORMS, kept_if="use_qk_norm", experts=SHARED_EXPERTS),
        Family("dots1", kept=HEAD_NORMS, experts=SHARED_EXPERTS),
        Family("solar_open", experts=SHARED_EXPERTS),
        Family(
            "mixtral",
            experts=Experts("block_sparse_moe.gate", "block_sparse_moe.experts", gate="w1", up="w3", down="w2"),
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
    )
}


def family_of(config: dict[str, Any]) -> Family:
    """The row of a model. Raises InputError for a `model_type` that has none."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise InputError(
            f"config.json: model_type {model_type!r} is not supported; known are {', '.join(sorted(FAMILIES))}. "
            "A new one is a row of ptq/families.py: see docs/add-a-family.md"
        )
    return FAMILIES[model_type]
