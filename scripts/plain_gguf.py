"""A model of transformers as a GGUF without a tokenizer, for benchmarks and tests; llama.cpp has a script for others.

pip install gguf
python scripts/plain_gguf.py MODEL OUT.gguf
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import gguf
import one_sentence
import torch
import typer
from transformers import AutoConfig

from ptq.files.checkpoint import Checkpoint

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""Of llama.cpp, by `model_type`."""
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def write(model: Path, out: Path) -> None:
    """Write the GGUF of a folder: matrices in bfloat16 or float32, as they are stored, vectors in float32."""
    config, source = AutoConfig.from_pretrained(model), Checkpoint.open(model)
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(out, architecture)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if experts := getattr(config, "num_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    for name, tensor in _tensors(source):
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        count = heads.get(name.split(".")[-2])
        if count is not None and architecture == "llama":  # neighbours are turned there, and halves of a head here
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        if tensor.dim() > 1 and tensor.dtype == torch.bfloat16:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(target, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(source: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors; those of the experts of a block in one, under a name without numbers, as llama.cpp has them."""
    fused: dict[str, dict[int, str]] = {}
    for name in source.tensors:
        if found := EXPERT.search(name):
            fused.setdefault(EXPERT.sub(".experts.", name), {})[int(found[1])] = name
        else:
            yield name, source.read(name)
    for name, parts in fused.items():
        yield name, torch.stack([source.read(parts[number]) for number in sorted(parts)])


def main(
    model: Annotated[Path, typer.Argument(help=f"A folder; one of {', '.join(ARCHITECTURES)}.")],
    out: Annotated[Path, typer.Argument(help="The file.")],
) -> None:
    """Write the file."""
    write(model, out)


if __name__ == "__main__":
    one_sentence.run(main)
