"""How many kernels a GPU launches per layer for a decoded token: counted on a CPU, without a GPU.

python scripts/count_launches.py

A tiny random Llama decodes one token over a static cache, with its weights laid out as on a GPU and all decisions made
as there. Every op that PyTorch dispatches is a launch, but those that only look at memory in another way or allocate
it. Ours are looked up in OWN; a second kernel that adds up splits of the columns is not counted. A layer is the
difference of two depths. "Before" is what transformers does itself between the packed linears.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import random_packed_model as packed
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp6.plan import Fp6Recipe
from ptq.fast.attention import decoded_attention
from ptq.fast.experts import few_token_experts
from ptq.kv.attention import CACHE
from ptq.layers import shared_input
from ptq.ops import matmul, prefill_attention
from ptq.recipe import Recipe
from ptq.weights import layouts
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

VARIANTS: dict[str, Recipe | None] = {
    "bf16": None,
    "INT4 W4A16": QuarotRecipe(rounding="nearest", group_size=128),
    "INT4 W4A8": QuarotRecipe(rounding="nearest", activation_bits=8),
    "INT4 W4A4, 4-bit cache": QuarotRecipe(rounding="nearest", activation_bits=4, key_bits=4, value_bits=4),
    "FP6 W6A16": Fp6Recipe(),
    "E8P W2A8": QuipSharpRecipe(rounding="nearest"),
}
OWN = {"kv_attend": 2, "decode_attention_at": 3, "kv_decode_attention_at": 3}
"""Launches of our ops where they are not one."""
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view",
        "_local_scalar_dense"}  # fmt: skip
"""No launches. The last one asks a CPU for the length of a static cache; a GPU is not asked."""


class Launches(TorchDispatchMode):
    """Counts what is dispatched within it, by op."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if space == "ptq":
            transformed = name == "gate_input" and args[4] > 0  # the gate, then its transform
            self.counts[name] += OWN.get(name, 1) + transformed
        elif name not in FREE and not _is_view(result, (args, kwargs)):
            self.counts[name] += 1
        return result


def _is_view(result: Any, given: Any) -> bool:
    """Whether a result lies in memory that was given, and nothing was written: ops in place give what they got."""
    held = {x.untyped_storage()._cdata: x for x in tree_leaves(given) if isinstance(x, Tensor)}
    made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    if not made or not all(x.untyped_storage()._cdata in held for x in made):
        return False
    return not any(x is y for x in made for y in held.values())


@contextmanager
def as_on_a_gpu(ours: bool) -> Iterator[None]:
    """CPU tensors are treated as those on a GPU are; `ours`: with the ops for a GPU."""
    with ExitStack() as stack:
        for owner, name, value in (
            (matmul, "lies_on_gpu", ours), (matmul, "cpu_ops_serve", False), (matmul, "dense_linear_serves", False),
            (decoded_attention, "cpu_ops_serve", False), (few_token_experts, "cpu_ops_serve", False),
            (shared_input, "_is_eligible", False), (prefill_attention, "cpu_ops_serve", False),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, lambda *args, value=value: value))
        stack.enter_context(patch.dict(layouts.LAYOUTS, cpu="fragments"))
        yield


@torch.no_grad()
def of_model(recipe: Recipe | None, layers: int, ours: bool) -> Counter[str]:
    """The launches of one decoded token."""
    config = packed.config_of("tiny")
    config.num_hidden_layers = layers
    with as_on_a_gpu(ours):
        model = packed.build(recipe, config, torch.device("cpu"), torch.bfloat16)
        cache = packed.cache_of(model, 64)

        def step(ids: Tensor, positions: Tensor) -> None:
            mask = torch.arange(64) <= positions[:, None, :, None]
            model(ids, position_ids=positions, attention_mask=mask, **{CACHE: cache})

        step(torch.arange(5)[None], torch.arange(5)[None])
        step(torch.tensor([[7]]), torch.tensor([[5]]))  # signs and layers are known now
        with Launches() as launches:
            step(torch.tensor([[8]]), torch.tensor([[6]]))
    return launches.counts


def of_layer(recipe: Recipe | None, ours: bool) -> Counter[str]:
    """The launches of one layer."""
    few, many = (of_model(recipe, layers, ours) for layers in (1, 2))
    return many - few


def main() -> None:
    """Print the table, and what the launches of a layer are."""
    print("| launches per layer | before | now | of which products | the rest |\n|---|---|---|---|---|")
    details = []
    for name, recipe in VARIANTS.items():
        before, now = (of_layer(recipe, ours) for ours in (False, True))
        products = sum(count for op, count in now.items() if "_fragments" in op or op in ("mm", "addmm", "linear"))
        total = sum(now.values())
        print(f"| {name} | {sum(before.values())} | {total} | {products} | {total - products} |")
        details.append(f"{name}, now: " + ", ".join(f"{op} {count}" for op, count in now.most_common()))
        details.append(f"{name}, before: " + ", ".join(f"{op} {count}" for op, count in before.most_common()))
    print("\n" + "\n".join(details))


if __name__ == "__main__":
    main()
