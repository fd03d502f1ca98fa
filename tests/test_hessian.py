"""Sums of x xᵀ, in panels and in parts, against float64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ptq.engine import ALONE
from ptq.hf.blocks import PartialModel
from ptq.statistics import hessian
from ptq.statistics.chunks import Chunks
from ptq.statistics.hessian import Hessians

CPU = torch.device("cpu")


class Two(PartialModel):
    """Two linears for a block, with names of which one begins like the other's panels."""

    def __init__(self) -> None:
        self.device = CPU
        self.linears = nn.ModuleDict({"a": nn.Linear(70, 5), "b": nn.Linear(5, 3)})

    def module(self, name: str) -> nn.Module:
        return self.linears[name.replace(".0", "b")[-1]]

    @torch.no_grad()
    def run(self, hidden: Tensor) -> Tensor:
        return self.linears["b"](self.linears["a"](hidden))


@pytest.mark.parametrize("panel", [16, 35, 70, 1024])
def test_panels_and_parts_are_the_sum(panel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian, "PANEL", panel)
    draw, part = torch.Generator().manual_seed(0), Two()
    rows = [torch.randn(2, 3, 70, generator=draw) for _ in range(9)]  # two parts
    hidden = Chunks(tmp_path / "hidden", CPU, ALONE)
    hidden.write(0, len(rows), lambda number: rows[number])
    (tmp_path / "hessians").mkdir()
    hessians = Hessians(tmp_path / "hessians", CPU, ALONE)
    hessians.collect("0", part, ["a", "a.0"], hidden, 0)
    x = torch.cat(rows).flatten(0, 1)
    for name, inputs in {"a": x, "a.0": part.linears["a"](x).detach()}.items():
        wanted = inputs.double().T @ inputs.double()
        found = hessians.read("0", name)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found, found.T)
