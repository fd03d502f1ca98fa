"""`ptq::e8p_layer`: a decoder layer that is held for its tokens (`ptq.ops.layer_ops`), with E8P weights in tiles."""

from ptq.ops.layer_ops import declare_layer
from ptq.ops.layer_reference import one_by_one
from quip_sharp import tiled_ops as _tiled_ops  # noqa: F401 (registers the ops)

WEIGHTS = "Tensor[] tiles, Tensor[] scale, int[] n, int bits"

layer = declare_layer("e8p_layer", WEIGHTS, one_by_one("e8p"))
