"""Formats of a plan that are settled when the weight is there: by a search for scales, by a choice of element."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from fp6.element import AUTO
from fp6.minifloat import MinifloatFormat, MinifloatGrid
from ptq.weights.rounding import ROW_CHUNK


@dataclass(frozen=True)
class SearchedFormat(MinifloatFormat):
    """`fp6/minifloat`, and how its scales are found. Of that nothing is stored: the bytes are those of the format."""

    search: str = "absmax"

    @property
    def codebook(self) -> MinifloatGrid:
        return MinifloatGrid(self.element, self.group_size, self.scale, self.search)


@dataclass(frozen=True)
class AutoFormat(SearchedFormat):
    """`fp6/minifloat` with the element of six bits that fits a weight better: a `ptq.weights.formats.Choice`.

    Its own `element` is only a stand-in. e2m3 halves the error of e3m2 where a row's numbers are close to Gaussian, and
    loses where its largest is many times their spread: which one it is, is measured.
    """

    def options(self) -> dict[str, Any]:
        return {**super().options(), "element": "auto"}

    def choose(self, w: Float[Tensor, "n k"], *, name: str = "weight") -> SearchedFormat:
        """The format with the smaller squared error under nearest rounding; the first of `AUTO` where they are equal.
        Raises InputError, naming `name`, for NaN or infinity."""
        errors = {element: self._error(w, element, name) for element in AUTO}
        return self._of(min(AUTO, key=lambda element: errors[element]))

    def _of(self, element: str) -> SearchedFormat:
        return SearchedFormat(element, self.group_size, self.scale, self.search)

    def _error(self, w: Float[Tensor, "n k"], element: str, name: str) -> float:
        grid, rows = self._of(element).codebook, max(1, ROW_CHUNK // max(1, w.shape[1]))
        return sum(grid.nearest(piece, name=name)[2] for piece in w.split(rows))
