"""The table of model families: one row of tensor names per Hugging Face `model_type`.

A row says which tensor plays which part; how the parts act together (what reads and writes the residual stream, which
linears share an input) is the same for all of them and is said once, in `ptq.outline` and in the methods' planners.
To add a family, add a row: docs/add-a-family.md. The tests in tests/test_families.py run over the whole table.
"""

from dataclasses import dataclass
from typing import Any

from ptq.errors import InputError


@dataclass(frozen=True)
class Experts:
    """Names of the parts of a mixture of experts in the files of a checkpoint, relative to the block.

    Expert e is the gated MLP `<experts>.<e>.<gate>` and so on; the router is a matrix with a row for every expert.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

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
    norm_offset: float = 0.0
    """What norms add to their stored gain: 1 for Gemma, which stores g - 1."""
    rope_interleaved: bool = False
    """RoPE turns channels 2 i and 2 i + 1 of a head together; False: i and i + d / 2 of the d that it turns."""
    rotate_residual: bool = True
    """False where something acts on a block's output before it is added, such as a norm with a gain: R1 is invalid."""
    unused: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    """Tensors of a block that old checkpoints carry and no model reads."""
    experts: Experts | None = None
    """What the blocks with experts have in the place of gate, up and down; None where no block has any."""


FAMILIES: dict[str, Family] = {
    row.model_type: row
    for row in (
        Family("llama"),
        Family("mistral"),
        Family("qwen2"),
        Family("qwen3", kept=("self_attn.q_norm.weight", "self_attn.k_norm.weight")),
        Family("granite"),
        Family("smollm3"),
        Family("ministral"),
        *(
            Family(
                model_type,
                attention_norm=None,
                mlp_norm=None,
                kept=(
                    "self_attn.q_norm.weight",
                    "self_attn.k_norm.weight",
                    "post_attention_layernorm.weight",
                    "post_feedforward_layernorm.weight",
                ),
                rotate_residual=False,
            )
            for model_type in ("olmo2", "olmo3")
        ),
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
        Family(
            "gemma3_text",
            mlp_norm="pre_feedforward_layernorm",
            kept=(
                "self_attn.q_norm.weight",
                "self_attn.k_norm.weight",
                "post_attention_layernorm.weight",
                "post_feedforward_layernorm.weight",
            ),
            norm_offset=1.0,
            rotate_residual=False,
        ),
        *(
            Family(model_type, kept=("self_attn.q_norm.weight", "self_attn.k_norm.weight"), experts=Experts())
            for model_type in ("qwen3_moe", "olmoe")
        ),
        Family(
            "mixtral",
            experts=Experts("block_sparse_moe.gate", "block_sparse_moe.experts", gate="w1", up="w3", down="w2"),
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
