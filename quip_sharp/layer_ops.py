"""`ptq::e8p_layer`: a decoder layer of a decoded token as one op (`ptq.ops.layer_ops`), for E8P weights in tiles."""

from ptq.ops.layer_ops import declare_layer, one_by_one
from quip_sharp import tiled_ops as _tiled_ops  # noqa: F401 (registers the ops)

WEIGHTS = "Tensor[] tiles, Tensor[] scale, int[] n, int bits"

layer = declare_layer("e8p_layer", WEIGHTS, one_by_one("e8p"))
