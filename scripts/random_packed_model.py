"""A random Llama on any device, with packed linears as a loaded checkpoint has them: for benchmarks of speed alone.

Nothing is quantised or stored: codes are random, in exactly the layers that a recipe plans, in its formats.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, StaticCache

from ptq import methods
from ptq.fast import whole_model
from ptq.hf.experts import Experts, is_fused
from ptq.kv.attention import SETTINGS, attach
from ptq.kv.static_cache import StaticPackedCache
from ptq.layers import linear
from ptq.layers.packed_weight import GUARD, INPUT_SIGNS, OUTPUT_SIGNS, PackedWeight, guard, stored_signs
from ptq.models.families import family_of
from ptq.models.model_shape import shape_of
from ptq.planning import packed_ends
from ptq.recipe import Recipe
from ptq.weights.formats import Format, Parts
from quarot.integer import IntegerFormat
from quarot.integer_scales import encode

SHAPES: dict[str, dict[str, Any]] = {
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192),
    "tiny": dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=256, max_position_embeddings=256),
}  # fmt: skip
"""8b: that of Llama 3 8B."""


def config_of(shape: str) -> LlamaConfig:
    return LlamaConfig(
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        architectures=["LlamaForCausalLM"],
        **SHAPES[shape],
    )


def build(recipe: Recipe | None, config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A random model whose linears are those that a recipe plans, as a loaded checkpoint would be; None: plain."""
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if recipe is None:
        return model
    family = family_of(config.to_dict())
    plan = methods.planner(recipe.method)(shape_of(config), family, recipe, {})
    plan = packed_ends.packed(plan, recipe.embedding_bits)
    signs: dict[int, Tensor] = {}
    for planned in plan.packed_linears():
        module = linear.swap(model, planned.name, linear.config_entry(planned))
        fill(module, device, signs)
    if plan.cache is not None:
        attach(model, plan.cache)
    whole_model.install(model)
    for module in model.modules():
        if isinstance(module, PackedWeight):
            module.prepack()
    return model


def fill(module: PackedWeight, device: torch.device, signs: dict[int, Tensor]) -> None:
    """Random codes, and scales that give weights of variance 1 / k. `signs`: random ones by their number, made here
    where they are missing; linears that read the same input must have the same."""
    k, n = module.in_features, module.out_features
    state = {f"weight_{part}": t for part, t in random_parts(module.format, n, k, device).items()}
    state[GUARD] = guard().to(device)
    if isinstance(module, linear.QuantLinear) and module.online.signs:
        for name, size in ((INPUT_SIGNS, k), (OUTPUT_SIGNS, n)):
            if size not in signs:
                drawn = torch.randint(0, 2, (size,), device=device).mul_(2).sub_(1)
                signs[size] = stored_signs(drawn)
            state[name] = signs[size]
    module.load_state_dict(state, assign=True)


def random_parts(form: Format, n: int, k: int, device: torch.device, size: float | None = None) -> Parts:
    """Stored parts. Scales of rows and groups are drawn around `size`; None: for weights of variance 1 / k."""
    if size is None:  # what scales around 1 give is measured on a small weight
        small = random_parts(form, 64, 1024, torch.device("cpu"), 1.0)
        size = float(k**-0.5 / form.dequantize(small, 64, 1024).std())
    parts: Parts = {}
    for part, (shape, dtype) in form.buffers(n, k).items():
        if part != "scale":
            parts[part] = torch.randint(0, 256, shape, dtype=dtype, device=device)
        elif dtype == torch.int16:
            parts[part] = torch.rand(shape, device=device).add_(0.5).mul_(size).bfloat16().view(dtype)
        elif isinstance(form, IntegerFormat):  # integer scales
            multiples = torch.randint(8, 16, (shape[0], shape[1] - 1), device=device)
            parts[part] = encode(multiples * 2.0 ** round(math.log2(size / 11)), form.scale)
        else:  # few for a whole weight
            parts[part] = torch.full(shape, size, device=device).view(dtype)
    return parts


def bytes_per_token(model: PreTrainedModel) -> int:
    """Of all weights that a token reads: of its experts, and of the embedding only where it is the head, too."""
    embedding = () if model.config.tie_word_embeddings else model.get_input_embeddings().parameters()
    total = sum(p.nbytes for p in model.parameters()) - sum(p.nbytes for p in embedding)
    for module in model.modules():
        if isinstance(module, Experts) or is_fused(module):
            count = module.count if isinstance(module, Experts) else len(next(module.parameters()))
            experts = sum(p.nbytes for p in module.parameters())
            total -= experts - experts * model.config.num_experts_per_tok // count
    return total


def cache_of(model: PreTrainedModel, length: int) -> Any:
    settings = getattr(model.base_model, SETTINGS, None)
    if settings is None:
        return StaticCache(config=model.config, max_cache_len=length)
    return StaticPackedCache(model.config, settings, length)
