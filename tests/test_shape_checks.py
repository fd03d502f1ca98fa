"""Shapes in signatures are checked while tests run."""

import jaxtyping
import pytest
import torch

from ptq.commands.windows import Windows
from ptq.ops import steps
from ptq.recipe import Recipe


def test_a_wrong_shape_is_found() -> None:
    x = torch.zeros(2, 8)
    assert steps.rms_norm(x, torch.ones(8), 1e-6, 0.0, False).shape == (2, 8)
    with pytest.raises(jaxtyping.TypeCheckError, match="rms_norm"):
        steps.rms_norm(x, torch.ones(1, 8), 1e-6, 0.0, False)
    with pytest.raises(jaxtyping.TypeCheckError, match="Windows"):
        Windows(torch.zeros(8, dtype=torch.long), 8, "none", "none")


def test_what_has_no_shapes_is_as_it_is_written() -> None:
    assert not hasattr(Recipe.__init__, "__wrapped__") and hasattr(Windows.__init__, "__wrapped__")
