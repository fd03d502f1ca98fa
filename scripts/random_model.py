"""Write a Llama of any size with random bf16 weights, a shard per block, for benchmarks. Memory: one block.

python scripts/random_model.py OUT --hidden 2048 --intermediate 5632 --heads 32 --kv-heads 8 --blocks 30 --vocab 32000
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import LlamaConfig

from ptq.demo import demo_path
from ptq.files.shards import write_json, write_tensors

Shard = dict[str, torch.Tensor]
Size = Annotated[int, typer.Option(min=1)]


def shards(hidden: int, intermediate: int, kv_width: int, blocks: int, vocab: int) -> Iterator[Shard]:
    """The ends, then every block."""
    generator = torch.Generator().manual_seed(0)

    def weights(**sizes: tuple[int, int]) -> Shard:
        drawn = {name: torch.randn(size, generator=generator).mul_(0.02).bfloat16() for name, size in sizes.items()}
        return {f"{name}.weight": weight for name, weight in drawn.items()}

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    ends = weights(embed_tokens=(vocab, hidden), lm_head=(vocab, hidden))
    yield {"lm_head.weight": ends.pop("lm_head.weight"), "model.norm.weight": ones, **_within("model", ends)}
    square, narrow, wide = (hidden, hidden), (kv_width, hidden), (intermediate, hidden)
    for index in range(blocks):
        attention = weights(q_proj=square, k_proj=narrow, v_proj=narrow, o_proj=square)
        mlp = weights(gate_proj=wide, up_proj=wide, down_proj=(hidden, intermediate))
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
    blocks: Size = 30,
    vocab: Size = 32000,
    positions: Size = 2048,
) -> None:
    """Write the model, with the demo's tokenizer; the same arguments give the same bytes."""
    if out.exists():
        raise typer.BadParameter(f"{out} exists; name another folder", param_hint="OUT")
    if hidden % heads or heads % kv_heads:
        raise typer.BadParameter("--heads must divide --hidden, and --kv-heads must divide --heads")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in Path(demo_path()).glob("tokenizer*"):
        shutil.copy(path, partial)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards(hidden, intermediate, hidden // heads * kv_heads, blocks, vocab), 1):
        file = f"model-{number:05d}-of-{blocks + 1:05d}.safetensors"
        write_tensors(partial / file, shard, {"format": "pt"})
        where |= dict.fromkeys(shard, file)
    write_json(partial / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=blocks,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=positions,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(partial)
    partial.rename(out)


if __name__ == "__main__":
    typer.run(main)
