"""Grids with scales for groups of neighbouring columns: `group_size` columns share one, 0: a whole row."""

from collections.abc import Sequence

import torch
from jaxtyping import Float32, Int16, Int64, Shaped
from torch import Tensor

from ptq.errors import InputError
from ptq.weights.formats import Format, Scales

SCALE = "weight_scale"
"""Name of the scales of a linear, where its format has the part `scale`."""


def has_scales(format: Format | None) -> bool:
    """Whether a format has scales [n, g] that may be any bfloat16 numbers, and stores their bits."""
    return getattr(format, "scale", None) == "bfloat16"


def stored_scale(scale: Float32[Tensor, "n g"]) -> Int16[Tensor, "n g"]:
    """Scales as they are stored there."""
    return scale.bfloat16().view(torch.int16)


def loaded_scale(stored: Int16[Tensor, "n g"]) -> Float32[Tensor, "n g"]:
    """Inverse of `stored_scale`."""
    return stored.view(torch.bfloat16).float()


def check_group_size(found: object, called: str = "group size") -> None:
    """Raise InputError for what is no size of a group."""
    if type(found) is not int or found < 0:
        raise InputError(f"{called} must be 0 (per output channel) or positive, found {found!r}")


class Grouped:
    """What such grids have in common. Scales are [n, g]."""

    group_size: int
    scale: str

    def groups(self, k: int, name: str = "weight") -> int:
        """Groups of a row of k weights. Raises InputError where the group size does not divide k."""
        if self.group_size and k % self.group_size:
            raise InputError(
                f"{name}: {k} columns do not divide into groups of {self.group_size}; "
                "choose a group size that divides them, or 0 for one scale per output channel"
            )
        return k // self.group_size if self.group_size else 1

    def groups_of(self, columns: Int64[Tensor, " c"]) -> Int64[Tensor, " c"]:
        """The group of each column."""
        return columns // self.group_size if self.group_size else columns.new_zeros(columns.shape)

    def finite(self, scale: Float32[Tensor, "n g"], name: str) -> Float32[Tensor, "n g"]:
        """The scales. Raises InputError for a row with NaN, which is what NaN or infinity in the weight gives."""
        bad = scale.isnan().any(1)
        if bad.any():
            raise InputError(f"{name}: NaN or infinity in row {int(bad.nonzero()[0])}; the weight cannot be quantised")
        return scale

    def multiplied(self, scales: Scales, factor: float) -> Scales | None:
        """As of `ptq.weights.formats.RowScaledCodebook`: of bfloat16 numbers; all others lie too far apart."""
        if self.scale != "bfloat16":
            return None
        return {**scales, "scale": (factor * scales["scale"]).bfloat16().float()}

    def transposed(
        self, parts: Sequence[Shaped[Tensor, "n _g"]], columns: Int64[Tensor, " c"]
    ) -> tuple[list[Float32[Tensor, "u n"]], Int64[Tensor, " c"]]:
        """Scales of the groups of these columns alone, and which of them each column has."""
        groups, group = torch.unique(self.groups_of(columns), return_inverse=True)
        return [part[:, groups].t().float().contiguous() for part in parts], group

    def expanded(self, scales: Scales, columns: Int64[Tensor, " c"] | None) -> tuple[Scales, int]:
        """Scales and group size of all columns (None), or one group for each of the given ones."""
        if columns is None:
            return scales, self.group_size
        group = self.groups_of(columns)
        return {part: scale[:, group] for part, scale in scales.items()}, 1
