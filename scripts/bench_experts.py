"""The chosen experts of a block, 8 of 128, in one call and one by one: tables of `bench_ops.py`."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_case import Case, Table, pooled, read_case
from random_packed_model import fill
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ptq.hf.experts import NAMES, Experts
from ptq.layers import linear
from ptq.ops import hadamard

HIDDEN, WIDTH, COUNT, CHOSEN = 2048, 768, 128, 8
"""Of Qwen3-30B-A3B."""
WIDE, NARROW = hadamard.construction(HIDDEN), hadamard.construction(WIDTH)
INTEGERS = {"format": "quarot/integer", "version": 1, "bits": 4, "group_size": 128, "symmetric": True}
FLOATS = {"format": "fp6/minifloat", "version": 1, "element": "e2m3", "group_size": 128, "scale": "bfloat16"}
LATTICE = {"format": "quip_sharp/e8p", "version": 1, "bits": 2, "signs": True}
INT8 = {"activation": {"bits": 8, "clip": 1.0}}
ROWS: dict[str, dict[str, Any]] = {
    "W4A16 g128": INTEGERS,
    "W4A8 g128": INTEGERS | INT8,
    "W6A16 g128": FLOATS,
    "W6A8 g128": FLOATS | INT8,
    "W2A8, E8P": LATTICE | INT8,
}


def packed(entry: dict[str, Any]) -> Experts:
    """Random experts, as a loaded checkpoint has them."""
    experts = Experts(NAMES[0], COUNT, HIDDEN, WIDTH, nn.SiLU(), torch.bfloat16)
    signs: dict[int, Tensor] = {}
    for number in range(COUNT):
        for name in NAMES[0]:
            module = linear.swap(experts, f"{number}.{name}", entry | transforms(entry, name == NAMES[0][2]))
            fill(module, torch.device("cpu"), signs)
            module.prepack()
    return experts


def transforms(entry: dict[str, Any], down: bool) -> dict[str, str]:
    """Of QuIP# on both sides; of QuaRot R4, in front of down_proj."""
    if entry["format"] == LATTICE["format"]:
        return {"hadamard": NARROW, "output_hadamard": WIDE} if down else {"hadamard": WIDE, "output_hadamard": NARROW}
    return {"hadamard": NARROW} if down and entry["format"] == INTEGERS["format"] else {}


def plain() -> nn.Module:
    """Those of transformers, in bfloat16."""
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=COUNT)
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config).bfloat16()
    for parameter in experts.parameters():
        parameter.normal_(std=0.02)
    return experts


def cases(tokens: int) -> dict[str, Case]:
    """Each call chooses other experts, until all had their turn."""
    x, found = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16), {"read": read_case()}
    choices = [torch.arange(CHOSEN).repeat(tokens, 1) + first for first in range(0, COUNT, CHOSEN)]
    shares = torch.full((tokens, CHOSEN), 1 / CHOSEN, dtype=torch.bfloat16)

    def add(name: str, experts: Any, peer: bool = False) -> None:
        nbytes = sum(parameter.nbytes for parameter in experts.parameters()) * CHOSEN // COUNT

        def run(chosen: Tensor) -> Tensor:
            return experts(x, chosen, shares)

        found[name] = Case(pooled(run, choices), nbytes, peer)

    for name, entry in ROWS.items():
        add(f"{name}, one call", packed(entry))
        single = packed(entry)
        single.few_tokens = _nothing  # pyright: ignore[reportAttributeAccessIssue]
        add(f"{name}, one by one", single, peer=True)
    add("transformers bfloat16", plain(), peer=True)
    return found


def _nothing(*_: Any) -> None:
    return None


def tables() -> Iterator[Table]:
    for tokens in (1, 4):
        make: Callable[[], dict[str, Case]] = lambda tokens=tokens: cases(tokens)  # noqa: E731
        yield f"experts {CHOSEN} of {COUNT}, [{WIDTH}, {HIDDEN}], batch {tokens}", "read", make
