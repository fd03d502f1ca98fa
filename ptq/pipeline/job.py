"""A job: everything that the tasks of one run share, and the modules and tensors that they build from it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from ptq.errors import refused
from ptq.files.checkpoint import Checkpoint
from ptq.hf import residual
from ptq.hf.blocks import UNRUN, PartialModel
from ptq.layers.linear import config_entry
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS, guard, stored_signs
from ptq.models.family import Family
from ptq.ops import hadamard, matmul
from ptq.pipeline import balance, ends, rewrite
from ptq.pipeline.ends import Matrix
from ptq.planning.plan import Balance, KeyBalance, LinearPlan, Plan, Rotation
from ptq.recipe import Recipe
from ptq.statistics import key_means
from ptq.weights import formats

PIECE_BYTES = 8 << 20
"""Float64 bytes of a weight that are rewritten at a time, where its rows do not depend on each other: small enough for
the allocator to use the same memory again. Fresh memory costs more than the rewriting itself."""


def calibrates_in_bfloat16(checkpoint: Checkpoint, family: Family) -> bool:
    """Whether calibration rows are multiplied in bfloat16 on a CPU: where the model, judged by its embedding, is stored
    so, as it will run so, and the CPU has such products."""
    return checkpoint.tensors[f"{family.embedding}.weight"].dtype == torch.bfloat16 and matmul.has_bfloat16()


Model = Literal["original", "rotated", "packed"]
"""The three models of a run: the source, the source with norms folded and rotations fused, and the result."""


@dataclass(frozen=True)
class Job:
    """What to do with which model, and its tensors as they are rewritten. Scales that were computed are kept: all
    those of rows, and the last one of a balance."""

    checkpoint: Checkpoint
    config: Any
    """The transformers config of the source."""
    family: Family
    recipe: Recipe
    plan: Plan
    signs: rewrite.Signs
    device: torch.device
    last_scale: dict[Balance | KeyBalance, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """The scale of the balance that was computed last."""
    row_scales: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """What `row_scale` has found, by linear."""

    def calibration_precision(self) -> AbstractContextManager[None]:
        """Within it, calibration rows go through a block: in bfloat16, where `calibrates_in_bfloat16` says so."""
        fast = self.device.type == "cpu" and calibrates_in_bfloat16(self.checkpoint, self.family)
        return matmul.in_bfloat16() if fast else nullcontext()

    def tensor(self, name: str) -> Tensor:
        """A tensor of the source. Raises InputError where it is not finite."""
        return self.checkpoint.read_checked(name)

    def rewritten(self, linear: LinearPlan, dtype: torch.dtype) -> Tensor:
        """The weight of a linear after folding and rotation, cast once from float64 to `dtype`; on the job's device."""
        return self._rewrite(linear, self.tensor(linear.source).to(self.device), self._gain(linear), dtype)

    def rewritten_rows(self, linear: LinearPlan) -> Iterator[Float[Tensor, "r k"]]:
        """`rewritten` in float32, some rows at a time: for the embedding and the head, where rows do not mix."""
        assert linear.output is None and linear.balance is None and not linear.even_rows, linear.name
        gain = self._gain(linear)
        for piece in self.tensor(linear.source).split(max(1, PIECE_BYTES // (8 * linear.k))):
            yield self._rewrite(linear, piece.to(self.device), gain, torch.float32)

    def bias(self, linear: LinearPlan) -> Float64[Tensor, " n"] | None:
        """The rewritten bias of a linear, or None where it has none."""
        name = f"{linear.name}.bias"
        if name not in self.checkpoint.tensors:
            return None
        parts, bias = linear.parts or (linear,), self.tensor(name).to(self.device)
        pieces = zip(parts, bias.split([part.n for part in parts]), strict=True)
        return torch.cat([rewrite.bias(part, piece, self.signs, self._factor(part)) for part, piece in pieces])

    def sign_tensors(self, linear: LinearPlan) -> dict[str, Tensor]:
        """The stored sign vectors of a linear that transforms its product back; none for others."""
        if linear.online_output is None:
            return {}
        assert linear.online is not None, linear.name
        sides = {INPUT_SIGNS: linear.online, OUTPUT_SIGNS: linear.online_output}
        found = {}
        for leaf, rotation in sides.items():
            vector = rewrite.signs_of(rotation, self.signs)
            vector = torch.ones(rotation.size).double() if vector is None else vector
            if leaf == OUTPUT_SIGNS and linear.even_rows:
                vector = vector * self.row_scale(linear).to(vector.device)
            found[f"{linear.name}.{leaf}"] = stored_signs(vector)
        return found

    def row_scale(self, linear: LinearPlan) -> Float64[Tensor, " n"]:
        """What the rows of a weight are divided by before they are rotated."""
        if linear.name not in self.row_scales:
            self.row_scales[linear.name] = rewrite.row_scale(self.tensor(linear.source).to(self.device))
        return self.row_scales[linear.name]

    def original_block(self, index: int, as_stored: bool = False) -> PartialModel:
        """A decoder block with the source's weights, in float32 or `as_stored`: see `PartialModel.load`."""
        part = self._part(index)
        unused = set(self.plan.unused)
        for name in self.checkpoint.tensors:
            if name.startswith(part.prefix) and name not in unused:
                part.load({name: self.tensor(name)}, as_stored)
        return part

    def rotate_block(self, index: int, part: PartialModel, linears: Iterable[LinearPlan] | None = None) -> None:
        """Turn an original block into the rewritten one, in place: weights in float32, not quantised. Or only these
        linears of it, and the norms."""
        for linear in self.plan.block(index) if linears is None else linears:
            if not linear.rewritten and not linear.acts_online:
                continue
            bias = self.bias(linear)
            self.rotate_weight(linear, part)
            if bias is not None:
                part.load({f"{linear.name}.bias": bias})
        part.load(dict(self.norms_and_kept(part.prefix)))

    def rotate_weight(self, linear: LinearPlan, part: PartialModel) -> None:
        """Rewrite the weight of a linear that a part holds."""
        gain = self._gain(linear)
        weight = self._rewrite(linear, part.take(f"{linear.name}.weight"), gain, torch.float32)
        if linear.acts_online:
            exact = replace(linear, format=formats.get("dense"), activation=None)
            part.pack({linear.name: config_entry(exact)})
            part.load({f"{linear.name}.weight": guard(), **self.sign_tensors(linear)})
        part.load({linear.dense_weight: weight})

    def quantize_inputs(self, index: int, part: PartialModel) -> None:
        """Quantise what a rewritten block is fed when it runs: the inputs of its linears, and its keys and values. It
        is no longer equal to the original then; Hessians are taken of what it sees now."""
        for linear in self.plan.block(index):
            if linear.activation is not None:
                part.quantize_input(linear.name, linear.activation)
        part.quantize_cache(self.plan.cache)

    def packed_block(self, index: int, tensors: dict[str, Tensor]) -> PartialModel:
        """A decoder block as it is written and runs, from its written tensors."""
        part = self._part(index)
        part.pack({linear.name: config_entry(linear) for linear in self.plan.block(index) if linear.format is not None})
        part.quantize_cache(self.plan.cache)
        part.load(tensors)
        return part

    @property
    def embedding(self) -> LinearPlan:
        """The plan of the embedding."""
        linear = self.plan.linear(self.family.embedding)
        assert linear is not None
        return linear

    @property
    def embeddings(self) -> tuple[LinearPlan, ...]:
        """The plans of all matrices of which a token has a row: of the embedding, and of what gives blocks inputs of
        their own."""
        return self.embedding, *(linear for linear in self.plan.ends() if linear.role == "layer_embedding")

    @property
    def head(self) -> LinearPlan:
        """The plan of the head, or of the embedding where they are tied."""
        return self.plan.linear(self.family.head) or self.embedding

    @property
    def lm_head(self) -> str:
        """Name of the weight with which the model makes logits; no tensor of a checkpoint where it is tied."""
        return f"{self.family.head}.weight"

    @property
    def final_tensors(self) -> tuple[str, ...]:
        """Names of the tensors behind the last block, beside the head's weight: those of the last norm, and the head's
        bias."""
        return tuple(name for name in ends.final_tensors(self.family) if name in self.checkpoint.tensors)

    def embed(
        self, matrices: Sequence[Matrix], ids: Int[Tensor, "batch t"], model: Model = "packed"
    ) -> Float[Tensor, "batch t k"]:
        """The state that enters the first block of a model, from the matrices of its `embeddings`; of the rotated one,
        from those of the source. Only the rows in use become float32."""

        def rows(linear: LinearPlan, matrix: Matrix, used: Int64[Tensor, " u"]) -> Float[Tensor, "u k"]:
            found = matrix.rows(used, linear.k)
            return self._rewrite(linear, found.to(self.device), None, torch.float32) if model == "rotated" else found

        part, pairs = self.end_part(model), list(zip(self.embeddings, matrices, strict=True))
        part.load(self.beside_embedding())
        with _running(model):
            return ends.embed(
                part, ids, lambda used: {f"{x.name}.weight": rows(x, matrix, used) for x, matrix in pairs}
            )

    def beside_embedding(self) -> dict[str, Tensor]:
        """The other tensors of which a model makes the state that enters its first block; none in most models."""
        return {name: self.tensor(name) for name in self.family.beside_embedding(len(self.embeddings) > 1)}

    def logits(
        self, matrix: Matrix, last: dict[str, Tensor], state: Float[Tensor, "rows t w"], model: Model = "packed"
    ) -> list[Float[Tensor, "1 t v"]]:
        """Logits of every row from the state that leaves the last block of a model, its head matrix and its tensors
        `last`."""
        rows = ends.logits(self.end_part(model), matrix, last, state)
        del matrix  # the largest of the model; the part may have it in float32
        with _running(model):
            return list(rows)

    def rewritten_last(self) -> dict[str, Tensor]:
        """The tensors that `final_tensors` names, those behind the last block, as the rotated model has them."""
        norms = dict(self.norms_and_kept(f"{self.family.final_norm}."))
        return {name: norms[name] if name in norms else self.tensor(name) for name in self.final_tensors}

    def _rewrite(self, linear: LinearPlan, w: Tensor, gain: Tensor | None, dtype: torch.dtype) -> Tensor:
        if not linear.rewritten:
            return w.to(dtype)
        result = torch.empty(len(w), linear.k, dtype=dtype, device=self.device)
        sizes = [part.n for part in linear.parts] or len(w)
        for part, rows, into in zip(linear.parts or (linear,), w.split(sizes), result.split(sizes), strict=True):
            self._rewrite_into(into, part, rows, gain)
        return result

    def _rewrite_into(self, result: Tensor, linear: LinearPlan, w: Tensor, gain: Tensor | None) -> None:
        order = linear.output.order if linear.output is not None else 1  # rows mix within blocks of this size
        rows = max(1, PIECE_BYTES // (8 * linear.k * order)) * order
        factor, row_scale = self._factor(linear), self.row_scale(linear) if linear.even_rows else None
        for start in range(0, len(w), rows):
            piece = slice(start, start + rows)
            result[piece] = rewrite.weight(linear, w[piece], gain, self.signs, start, factor, row_scale)

    def _factor(self, linear: LinearPlan) -> Float64[Tensor, " c"] | None:
        """What the balance of a linear multiplies its rows or columns with."""
        if linear.balance is None:
            return None
        if linear.balance not in self.last_scale:
            self.last_scale.clear()  # two linears want it, one after the other
            found = balance.scale_of(linear.balance, self._read, self.plan.norm_offset, self._bias_left(linear))
            self.last_scale[linear.balance] = found
        return balance.factor(linear, self.last_scale[linear.balance])

    def _bias_left(self, linear: LinearPlan) -> Float64[Tensor, " head_dim"] | None:
        if not self.plan.centered or not isinstance(linear.balance, KeyBalance):
            return None
        return key_means.bias_left(self._part(None).model, linear.balance.shape, linear.balance.interleaved)

    def _gain(self, linear: LinearPlan) -> Float64[Tensor, " k"] | None:
        """What the norm multiplies with that is folded into a linear."""
        if linear.norm is None:
            return None
        return self.tensor(linear.norm).to(self.device).double() + self.plan.norm_offset

    def _read(self, name: str) -> Tensor | None:
        return self.tensor(name).to(self.device) if name in self.checkpoint.tensors else None

    def residual_rotation(self) -> Rotation | None:
        """R1, as the embedding applies it."""
        return self.plan.online_residual or self.embedding.input

    def residual_signs(self) -> dict[str, Tensor]:
        """The tensors of an R1 that acts when the model runs; none where it is fused, or there is none."""
        if self.plan.online_residual is None:
            return {}
        vector = rewrite.signs_of(self.plan.online_residual, self.signs)
        assert vector is not None
        return dict.fromkeys(residual.tensors(self.family), stored_signs(vector))

    def end_part(self, model: Model) -> PartialModel:
        """A part without a block, for the embedding and the head of a model."""
        part = self._part(None)
        if model != "original" and self.plan.online_residual is not None:
            construction = hadamard.construction(self.plan.online_residual.order)
            residual.install(part.model, construction)
            part.load(self.residual_signs())
        return part

    def _part(self, index: int | None) -> PartialModel:
        return PartialModel(self.config, self.family, index, self.device)

    def norms_and_kept(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors with a prefix that are no linear's, as they are written, in float32."""
        for name in self.plan.unit_norms:
            if name.startswith(prefix):
                shape = self.checkpoint.tensors[name].shape
                yield name, torch.full(shape, 1 - self.plan.norm_offset, device=self.device)
        for name in self.plan.kept:
            if name.startswith(prefix):
                yield name, self.tensor(name).float().to(self.device)


def _running(model: Model) -> AbstractContextManager[None]:
    """Around what transformers makes of a model: of the original, its settings alone are to blame for an error."""
    return refused(UNRUN) if model == "original" else nullcontext()
