"""Rows of the table of model families (`ptq.models.families`): models with plain attention and one MLP."""

from ptq.models.family import Family
from ptq.models.family_parts import HEAD_NORMS, POST_NORMS

ROWS = (
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
    Family(
        "exaone",
        published=(
            ("transformer.wte", "model.embed_tokens"),
            ("transformer.h", "model.layers"),
            ("transformer.ln_f", "model.norm"),
            ("attn.attention", "self_attn"),
            ("self_attn.out_proj", "self_attn.o_proj"),
            ("ln_1", "input_layernorm"),
            ("ln_2", "post_attention_layernorm"),
            ("mlp.c_fc_0", "mlp.gate_proj"),
            ("mlp.c_fc_1", "mlp.up_proj"),
            ("mlp.c_proj", "mlp.down_proj"),
        ),
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
    Family("cohere_compass_text", mlp_norm="input_layernorm", rotate_residual=False),
)
