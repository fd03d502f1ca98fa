"""`ptq::minifloat_layer`: a decoder layer that is held for its tokens (`ptq.ops.layer_ops`), with small floats in
tiles."""

from fp6 import tiled_ops as _tiled_ops  # noqa: F401 (registers the ops)
from ptq.ops.layer_ops import declare_layer
from ptq.ops.layer_reference import one_by_one

WEIGHTS = "Tensor[] tiles, Tensor[] scale, int[] n, int exponent, int mantissa, int group_size"

layer = declare_layer("minifloat_layer", WEIGHTS, one_by_one("minifloat"))
