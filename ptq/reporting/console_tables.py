"""A plan, and what is inside a checkpoint, as tables for people."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from ptq.layers.linear import config_entry
from ptq.layers.packed_weight import NOT_OF_THE_FORMAT
from ptq.planning.outline import of_any_expert
from ptq.planning.plan import LinearPlan, Plan, Rotation
from ptq.reporting.contents import Contents, Group

LEGEND = """\
norm: its gain moves into the weight. input, output: rotations that are fused into the weight. online: what a layer does
to its input when the model runs. 4 x H64: a Hadamard matrix of order 64 for each quarter; signs: random, so named."""


def plan_table(plan: Plan) -> str:
    """What happens to every linear. Blocks whose row is the same share one, and so do experts, with * for their
    number, and which they are where they are not all."""
    rows: dict[tuple[str, ...], tuple[dict[int, None], set[int]]] = {}
    most_experts = 1 + max((linear.expert for linear in plan.linears if linear.expert is not None), default=0)
    for linear in plan.linears:
        norm = (linear.norm or "").removesuffix(".weight").rpartition(".")[2]
        names = (linear.name, f"{linear.n} x {linear.k}", norm, *_rotations(linear))
        names = tuple(map(of_any_expert, names))
        if linear.block is not None:  # sign vectors bear its number too: R2.0
            name, *cells = (re.sub(rf"(?<=\.){linear.block}(?=[. ]|$)", "*", name) for name in names)
            names = name, *(cell.replace(f".{plan.layers}.*.", ".") for cell in cells)  # of QuIP#'s sign vectors
        blocks, experts = rows.setdefault((*names, _format(linear)), ({}, set()))
        blocks.update({} if linear.block is None else {linear.block: None})
        experts.update(() if linear.expert is None else (linear.expert,))
    lines = [["linear", "blocks", "n x k", "norm", "input", "output", "online", "format"]]
    for (name, *cells), (blocks, experts) in rows.items():
        some = f" ({', '.join(_ranges(sorted(experts)))})" if 0 < len(experts) < most_experts else ""
        lines.append([name + some, ", ".join(_ranges(list(blocks))), *cells])
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]  # the others say nothing
    table = Table(*(title for title, *_ in columns), box=None)
    for line in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*line)
    explained = any(cell for row in rows for cell in row[2:6])  # what the legend is about
    return f"{_render(table)}\n{LEGEND}" if explained else _render(table)


def whole_table(shown: RenderableType) -> str:
    """As wide as the terminal, and where that would cut long names, as they are."""
    console = Console(markup=False, highlight=False, emoji=False)
    whole = console.measure(shown, options=console.options.update(width=1 << 16)).maximum
    console.width = max(console.width, whole)
    with console.capture() as table:
        console.print(shown)
    return table.get().rstrip("\n")


def contents_table(contents: Contents) -> str:
    """Formats, sizes and true bits per weight."""
    table = Table("format", "options", "online rotation", "linears", "weights", "MB", "bits/weight", box=None)
    for group in _but_for_clips(contents.groups):
        scheme = group.scheme
        table.add_row(
            f"{scheme['format']} v{scheme['version']}", _options(scheme), _matrices(scheme),
            str(len(group.linears)), f"{group.weights:,}", f"{group.nbytes / 1e6:.2f}", f"{group.bits_per_weight:.3f}"
        )  # fmt: skip
    if contents.bits_per_weight is not None:
        table.add_row("all quantised weights", "", "", "", "", "", f"{contents.bits_per_weight:.3f}")
    table.add_row("plain tensors", "", "", "", "", f"{contents.plain_bytes / 1e6:.2f}", "")
    table.add_row("the checkpoint", "", "", "", "", f"{contents.nbytes / 1e6:.2f}", "")
    return _render(table)


def _but_for_clips(groups: Iterable[Group]) -> Iterator[Group]:
    """Groups whose schemes differ in the clip of the input alone as one, which says from where to where it goes."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        bits = (group.scheme.get("activation") or {}).get("bits")
        found.setdefault(repr({**group.scheme, "activation": bits}), []).append(group)
    for first, *others in found.values():
        if others:
            clips = sorted(group.scheme["activation"]["clip"] for group in (first, *others))
            activation = {**first.scheme["activation"], "clip": f"{clips[0]}..{clips[-1]}"}
            first = Group(
                {**first.scheme, "activation": activation},
                tuple(name for group in (first, *others) for name in group.linears),
                sum(group.weights for group in (first, *others)),
                sum(group.nbytes for group in (first, *others)),
            )
        yield first


def cache_line(settings: dict[str, Any]) -> str:
    """How keys and values are cached."""
    return f"KV cache: {' '.join(f'{key}={value}' for key, value in settings.items())}"


def residual_line(construction: str) -> str:
    """Where R1 acts when the model runs."""
    return f"R1 ({construction}): behind the embedding, and back in front of the last norm"


def _ranges(numbers: list[int]) -> Iterator[str]:
    """0, 1, 2, 5 as 0-2 and 5."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            first, last = numbers[start], numbers[end - 1]
            yield str(first) if first == last else f"{first}-{last}"
            start = end


def _rotations(linear: LinearPlan) -> list[str]:
    def text(rotation: Rotation | None) -> str:
        if rotation is None:
            return ""
        blocks = f"{rotation.size // rotation.order} x " if rotation.order != rotation.size else ""
        matrix = f"{blocks}H{rotation.order}" if rotation.order > 1 else ""
        return " ".join(filter(None, [matrix, f"signs {rotation.signs}" if rotation.signs else ""]))

    outputs = [(part.role, text(part.output)) for part in linear.parts if part.output]
    output = ", ".join(f"{role}: {found}" for role, found in outputs) or text(linear.output)
    return [text(linear.input), output, text(linear.online)]


def _format(linear: LinearPlan) -> str:
    if linear.format is None:
        return "as it is"
    entry = config_entry(linear)
    if linear.clip_search is not None:
        entry["activation"]["clip"] = "searched"
    return f"{entry['format']} {_options(entry)}"


def _options(scheme: dict[str, Any]) -> str:
    """What config.json says of a scheme beside its format and Hadamard matrix."""
    inner = scheme.get("of")  # of a prepacked weight
    options = [] if inner is None else [f"{inner['format']} v{inner['version']}", _options(inner)]
    options += [f"{key}={value}" for key, value in scheme.items() if key not in (*NOT_OF_THE_FORMAT, "of")]
    activation = scheme.get("activation")
    return " ".join(options + ([f"input bits={activation['bits']} clip={activation['clip']}"] if activation else []))


def _matrices(scheme: dict[str, Any]) -> str:
    """The Hadamard matrices that run with a layer: of its input, and of its product."""
    return " | ".join(str(scheme[side]) for side in ("hadamard", "output_hadamard") if side in scheme)


def _render(table: Table) -> str:
    plain = Console(width=400)
    with plain.capture() as capture:
        plain.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
