"""Grids with scales for groups of neighbouring columns: `group_size` columns share one, 0: a whole row."""

from jaxtyping import Int64
from torch import Tensor

from ptq.errors import InputError
from ptq.weights.formats import Scales


class Grouped:
    """What such grids have in common. Scales are [n, g]."""

    group_size: int

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

    def expanded(self, scales: Scales, columns: Int64[Tensor, " c"] | None) -> tuple[Scales, int]:
        """Scales and group size of all columns (None), or one group for each of the given ones."""
        if columns is None:
            return scales, self.group_size
        group = self.groups_of(columns)
        return {part: scale[:, group] for part, scale in scales.items()}, 1
