"""R1 at the ends of a model with a tied head, on a GPU: the numbers of the CPU, also with signs that came along."""

from pathlib import Path

import pytest
import torch
from test_ops import GPU, HALVES
from transformers import AutoModelForCausalLM

import ptq
from ptq.hf import residual
from quarot.plan import QuarotRecipe

# gpu_check.sh downloads nothing: it takes the transformers that it finds.
pytest.importorskip("transformers", minversion="5.23")


@HALVES
@torch.no_grad()
def test_a_model_whose_head_stays_tied(dtype: torch.dtype, tmp_path: Path) -> None:
    recipe = QuarotRecipe(rounding="nearest", group_size=64)
    ptq.quantize("demo", tmp_path / "out", recipe, ptq.RunOptions(progress=False, device="cpu"))
    ids = torch.arange(5, 37)[None]
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(ids).logits
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).to(GPU)
    assert all(module.get_buffer(residual.SIGNS).is_cuda for module in residual.ends_of(model).values())
    found = model(ids.to(GPU)).logits.float().cpu()
    assert (found - wanted).norm() < 0.05 * wanted.norm()
