"""The report of a run: what it did to the model, as numbers (`report.json`) and as one page (`report.html`)."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from ptq.files import dtypes
from ptq.files.header import TensorInfo
from ptq.files.json_numbers import six_digits
from ptq.files.shards import write_bytes, write_json
from ptq.files.source import name_of
from ptq.hf import residual
from ptq.layers.packed_weight import INPUT_SIGNS, OUTPUT_SIGNS
from ptq.models.family import Family
from ptq.planning.outline import of_any_expert
from ptq.planning.plan import LinearPlan, Plan, weights_of
from ptq.reporting.report_page import page
from ptq.reporting.report_schema import (
    JSON,
    PAGE,
    VERSION,
    LayerRow,
    Observed,
    Positions,
    Report,
    Share,
    Spread,
    Training,
)
from ptq.statistics.outliers import MeasuredInput

MEASURES = ("error", "loss", "nearest_loss", "clip_error", "default_clip_error")
"""Of a linear's record."""
CURVE_POINTS = 512
"""Most points of a curve over channels: each is the largest of its run of neighbours, so no peak is lost."""


def build(
    *,
    model: str,
    plan: Plan,
    family: Family,
    record: Mapping[str, Any],
    result: Mapping[str, Any],
    source: Mapping[str, TensorInfo],
    written: Mapping[str, TensorInfo],
    log: Sequence[Mapping[str, Any]],
    before: Mapping[str, MeasuredInput],
    after: Mapping[str, MeasuredInput],
    positions: Float64[Tensor, "3 rows t"] | None = None,
    text: str = "",
    trainings: Mapping[str, Sequence[float | None]] = MappingProxyType({}),
) -> Report:
    """The report of a run that is done.

    `record` is `Record.as_dict()`; `result` the fields of `result.Result` without `out`; `source` and `written` the
    tensors of the two checkpoints; `log` is `Tasks.log()`; `before` and `after` the observed inputs of the original
    and of the rotated blocks, by linear; `positions` what `outliers.by_position` found on rows of `text`; `trainings`
    is `stages.trainings`.
    """
    drawn = _drawn(plan)
    quantised = [linear for linear in plan.packed_linears() if linear.format and linear.format.codebook]
    return Report(
        version=VERSION,
        model=name_of(model),
        family=family.model_type,
        made_with=str(record["version"]),
        fingerprint=str(record["fingerprint"]),
        recipe=dict(record["recipe"]),
        notes=tuple(plan.notes),
        bits_per_weight=six_digits(result["bits_per_weight"]),
        quantised_weights=weights_of(quantised),
        bytes_before=sum(info.stored_bytes for name, info in source.items() if name not in plan.unused),
        bytes_after=sum(info.nbytes for info in written.values()),
        **{key: six_digits(result[key]) for key in ("rotation_error", "kl", "top1", "kl_standard_error")},
        shares=_shares(plan, source, written),
        layers=tuple(_layers(plan, log, written)),
        inputs=tuple(
            _observed(plan, name, before[name], after[name], name in drawn) for name in before if name in after
        ),
        positions=None if positions is None or not positions.numel() else _positions(positions, text),
        trainings=tuple(Training(name, tuple(losses)) for name, losses in trainings.items()),
    )


def write(report: Report, folder: Path) -> None:
    """Write `report.json` and `report.html` into a folder, each atomically. Raises RunError."""
    write_json(folder / JSON, asdict(report))
    write_bytes(folder / PAGE, page(report).encode(errors="replace"))  # file names can be no Unicode


def _drawn(plan: Plan) -> set[str]:
    """The linears whose channels are drawn: attention and MLP inputs of the first, the middle and the last block."""
    blocks = {0, plan.blocks // 2, plan.blocks - 1}
    roles = {"query", "mixer_input", "down"}
    return {linear.name for block in blocks for linear in plan.block(block) if roles & set(linear.role.split("+"))}


def _layers(plan: Plan, log: Sequence[Mapping[str, Any]], written: Mapping[str, TensorInfo]) -> Iterator[LayerRow]:
    lines, nbytes = {line["name"]: line for line in log}, Counter()
    for name, info in written.items():
        owner, _, leaf = name.rpartition(".")
        nbytes[owner] += info.nbytes if leaf.startswith("weight") else 0
    for linear in plan.linears:
        dtype = written[f"{linear.name}.weight"].dtype
        yield _layer(linear, lines.get(linear.name, {}), dtype, nbytes[linear.name])


def _layer(linear: LinearPlan, line: Mapping[str, Any], dtype: torch.dtype, nbytes: int) -> LayerRow:
    if linear.format is None:
        storage = dtypes.dtype_name(dtype)
    else:
        options = (f"{key}={value}" for key, value in linear.format.options().items())
        storage = " ".join([linear.format.name, *options])
    parts = {f"out ({part.role})": part.output for part in linear.parts}
    sides = {"in": linear.input, "out": linear.output, **parts, "online": linear.online}
    rotations = (f"{side}: {found.signs or ''} H{found.order}" for side, found in sides.items() if found)
    return LayerRow(
        name=linear.name,
        block=linear.block,
        n=linear.n,
        k=linear.k,
        storage=storage,
        rotation=", ".join(" ".join(rotation.split()) for rotation in rotations),
        activation_bits=None if linear.activation is None else linear.activation.bits,
        nbytes=nbytes,
        activation_clip=None if linear.activation is None else linear.activation.clip,
        **six_digits({key: line.get(key) for key in MEASURES}),
    )


def _shares(plan: Plan, source: Mapping[str, TensorInfo], written: Mapping[str, TensorInfo]) -> tuple[Share, ...]:
    """Bytes by kind of tensor, the kinds in the order in which they first appear in the result."""
    linears = {linear.name for linear in plan.linears}
    ends = {linear.name: "head" if linear.role == "head" else "embedding" for linear in plan.ends()}

    def part(name: str, info: TensorInfo) -> str:
        owner, _, leaf = name.rpartition(".")
        if owner in ends and leaf.startswith("weight"):
            return ends[owner]
        if leaf in (residual.SIGNS, INPUT_SIGNS, OUTPUT_SIGNS):
            return "sign vectors"
        if owner not in linears:
            return "norms"
        if leaf == "bias":
            return "biases"
        if leaf in ("weight", "weight_dense") and len(info.shape) > 1:  # else the guard of a packed one
            return "weights"
        kind = leaf.removeprefix("weight_")
        return kind if kind in ("scale", "zero") else "codes"  # the lattice has them in several planes

    found: dict[str, list[int]] = {}
    for side, tensors in enumerate((source, written)):
        for name, info in tensors.items():
            if side == 1 or name not in plan.unused:
                found.setdefault(part(name, info), [0, 0])[side] += info.stored_bytes
    return tuple(Share(name, *sizes) for name, sizes in sorted(found.items(), key=lambda item: -max(item[1])))


def _observed(plan: Plan, name: str, before: MeasuredInput, after: MeasuredInput, drawn: bool) -> Observed:
    block, linear = int(name.removeprefix(f"{plan.layers}.").partition(".")[0]), plan.linear(name)
    alike = [] if linear is None else [other for other in plan.block(block) if other.role == linear.role]  # experts too
    rounded = any(other.activation is not None for other in alike)
    kind = of_any_expert(name.removeprefix(f"{plan.layers}.{block}."))
    spreads = (_spread(found, drawn, rounded) for found in (before, after))
    return Observed(name, block, kind, len(before.peak), *spreads)


def _spread(found: MeasuredInput, drawn: bool, rounded: bool) -> Spread:
    curve = None
    if drawn:
        runs = torch.tensor_split(found.peak, min(CURVE_POINTS, len(found.peak)))
        curve = tuple(six_digits(float(run.max()) / found.rms) if found.rms > 0 else None for run in runs)
    median = float(found.peak.median())
    return Spread(
        rms=six_digits(found.rms),
        kurtosis=six_digits(found.kurtosis),
        peak_to_rms=six_digits(found.peak_to_rms),
        peak_to_median=six_digits(float(found.peak.max()) / median) if median > 0 else None,
        rounding_error=six_digits(found.rounding_error) if rounded else None,
        curve=curve,
    )


def _positions(found: Float64[Tensor, "3 rows t"], text: str) -> Positions:
    curves = (tuple(six_digits(curve)) for curve in found.mean(1).tolist())
    return Positions(text, found.shape[1], *curves)
