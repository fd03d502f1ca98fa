"""Write a Llama of any size, or with `--experts` a Qwen 3 MoE, with random bf16 weights, a shard per block, for
benchmarks. Memory: one block.

python scripts/random_model.py OUT --hidden 2048 --intermediate 5632 --heads 32 --kv-heads 8 --blocks 30 --vocab 32000
python scripts/random_model.py OUT --experts 128 --intermediate 768 --head-dim 128 --kv-heads 4      # Qwen3-30B-A3B's
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import one_sentence
import torch
import typer
from transformers import LlamaConfig, Qwen3MoeConfig

from ptq.demo import demo_path
from ptq.files.shards import write_json, write_tensors

Shard = dict[str, torch.Tensor]
Size = Annotated[int, typer.Option(min=1)]


def shards(config: LlamaConfig | Qwen3MoeConfig) -> Iterator[Shard]:
    """The ends, then every block."""
    generator = torch.Generator().manual_seed(0)
    hidden, width, vocab, head_dim = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    assert head_dim is not None and config.num_key_value_heads is not None
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim

    def weights(**sizes: tuple[int, int]) -> Shard:
        drawn = {name: torch.randn(size, generator=generator).mul_(0.02).bfloat16() for name, size in sizes.items()}
        return {f"{name}.weight": weight for name, weight in drawn.items()}

    def gated_mlp(width: int) -> Shard:
        return weights(gate_proj=(width, hidden), up_proj=(width, hidden), down_proj=(hidden, width))

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    ends = weights(embed_tokens=(vocab, hidden), lm_head=(vocab, hidden))
    yield {"lm_head.weight": ends.pop("lm_head.weight"), "model.norm.weight": ones, **_within("model", ends)}
    for index in range(config.num_hidden_layers):
        narrow = (keys, hidden)
        attention = weights(q_proj=(queries, hidden), k_proj=narrow, v_proj=narrow, o_proj=(hidden, queries))
        if isinstance(config, Qwen3MoeConfig):
            attention |= {f"{name}_norm.weight": ones[:head_dim] for name in "qk"}
            mlp = weights(gate=(config.num_experts, hidden))
            for number in range(config.num_experts):
                mlp |= _within(f"experts.{number}", gated_mlp(config.moe_intermediate_size))
        else:
            mlp = gated_mlp(width)
        norms = {f"{name}_layernorm.weight": ones for name in ("input", "post_attention")}
        yield _within(f"model.layers.{index}", _within("self_attn", attention) | _within("mlp", mlp) | norms)


def _within(prefix: str, tensors: Shard) -> Shard:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def main(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the model: a new one.")],
    hidden: Size = 2048,
    intermediate: Size = 5632,
    heads: Size = 32,
    kv_heads: Size = 8,
    head_dim: Annotated[int | None, typer.Option(min=1, help="By default hidden / heads.")] = None,
    blocks: Size = 30,
    vocab: Size = 32000,
    positions: Size = 2048,
    experts: Annotated[int, typer.Option(min=0, help="In every block, each of --intermediate; 0: one MLP.")] = 0,
    chosen: Annotated[int, typer.Option(min=1, help="Experts for a token.")] = 8,
) -> None:
    """Write the model, with the demo's tokenizer; the same arguments give the same bytes."""
    if out.exists():
        raise typer.BadParameter(f"{out} exists; name another folder", param_hint="OUT")
    if (head_dim is None and hidden % heads) or heads % kv_heads:
        raise typer.BadParameter("--heads must divide --hidden, and --kv-heads must divide --heads")
    sizes: dict[str, Any] = dict(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=blocks, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim or hidden // heads, intermediate_size=intermediate,
        max_position_embeddings=positions, dtype="bfloat16",
    )  # fmt: skip
    if experts:
        sizes |= dict(num_experts=experts, num_experts_per_tok=chosen, moe_intermediate_size=intermediate)
        config = Qwen3MoeConfig(**sizes, norm_topk_prob=True, architectures=["Qwen3MoeForCausalLM"])
    else:
        config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in Path(demo_path()).glob("tokenizer*"):
        shutil.copy(path, partial)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards(config), 1):
        file = f"model-{number:05d}-of-{blocks + 1:05d}.safetensors"
        write_tensors(partial / file, shard, {"format": "pt"})
        where |= dict.fromkeys(shard, file)
    write_json(partial / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    config.save_pretrained(partial)
    partial.rename(out)


if __name__ == "__main__":
    one_sentence.run(main)
