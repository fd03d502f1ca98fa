"""Write a model of a family with random bf16 weights, few blocks of the shape of a real one, for benchmarks. Memory:
the model.

python scripts/random_family.py qwen3.5-moe OUT
"""

import shutil
from pathlib import Path
from typing import Annotated, Any

import one_sentence
import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ptq.demo import demo_path

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-moe": ("qwen3_5_moe_text", dict(
        hidden_size=2048, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    )),
    "glm-4.5-air": ("glm4_moe", dict(
        hidden_size=4096, num_hidden_layers=4, num_attention_heads=96, num_key_value_heads=8, head_dim=128,
        n_routed_experts=64, num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=1408,
        first_k_dense_replace=0, n_group=1, topk_group=1, attention_bias=True, use_qk_norm=False,
    )),
    "glm-4.7-flash": ("glm4_moe_lite", dict(
        hidden_size=2048, intermediate_size=10240, num_hidden_layers=8, num_attention_heads=20, num_key_value_heads=20,
        q_lora_rank=768, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256,
        n_routed_experts=64, num_experts_per_tok=4, n_shared_experts=1, moe_intermediate_size=1536,
        first_k_dense_replace=1, n_group=1, topk_group=1,
    )),
    "gpt-oss": ("gpt_oss", dict(
        hidden_size=2880, intermediate_size=2880, num_hidden_layers=6, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, num_local_experts=32, num_experts_per_tok=4,
    )),
    "granite-4-h": ("granitemoehybrid", dict(
        hidden_size=1536, shared_intermediate_size=4096, num_hidden_layers=20, num_attention_heads=12,
        num_key_value_heads=4, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=48, mamba_d_head=64,
        mamba_d_state=128, position_embedding_type="nope", layer_types=2 * [*9 * ["mamba"], "attention"],
    )),
    "nemotron-nano": ("nemotron_h", dict(
        hidden_size=4480, intermediate_size=15680, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
        mamba_num_heads=128, mamba_head_dim=80, layers_block_type=[*3 * ["mamba", "mlp"], "attention", "mlp"],
    )),
    "falcon-h1": ("falcon_h1", dict(
        hidden_size=2048, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=2,
        head_dim=128, mamba_d_ssm=3072, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=256, mamba_n_groups=1,
    )),
}  # fmt: skip
"""By name: family, and what its config differs in. Fewer blocks than the real ones have, and half of the experts of the
first two; vocabulary 32000."""

COMMON: dict[str, Any] = dict(vocab_size=32000, max_position_embeddings=8192, dtype="bfloat16")


def made(name: str) -> PreTrainedModel:
    """The model, whose numbers are the same every time."""
    model_type, sizes = SHAPES[name]
    config = CONFIG_MAPPING[model_type](**COMMON, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if not bool(parameter.isfinite().all()):  # some classes leave memory as it is
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the model: a new one.")],
) -> None:
    """Write the model, with the demo's tokenizer."""
    if name not in SHAPES:
        raise typer.BadParameter(f"{name} is none of {', '.join(SHAPES)}", param_hint="NAME")
    if out.exists():
        raise typer.BadParameter(f"{out} exists; name another folder", param_hint="OUT")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    made(name).save_pretrained(partial)
    for path in Path(demo_path()).glob("tokenizer*"):
        shutil.copy(path, partial)
    partial.rename(out)


if __name__ == "__main__":
    one_sentence.run(main)
