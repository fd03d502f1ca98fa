"""Give a model activation outliers without changing what it computes: a test case for everything that rounds.

python scripts/plant_outliers.py MODEL OUT

In every block, a few channels of the residual stream are scaled where the norms hand them to attention and MLP (the
norm's gain times s, the columns of its readers over s), and a few channels between up and down (rows of up times s,
columns of down over s). Scales that are powers of two leave every product as it was, to the bit, in any dtype.

With --keys only keys get outliers: the two channels of a pair that turns with the position, in every key-value head,
times s, and over s in the queries that read them.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import one_sentence
import torch
import typer
from torch import Tensor

from ptq.files import source
from ptq.files.checkpoint import Checkpoint
from ptq.files.header import read_header
from ptq.files.shards import write_tensors
from ptq.hf.meta_model import transformers_config
from ptq.models.families import family_of
from ptq.models.family import Family
from ptq.models.model_shape import ModelShape, shape_of
from ptq.pipeline import balance
from ptq.planning.outline import Tensors, first_row, outline
from ptq.planning.rotations import READERS

FACTORS = (32.0, 64.0)
"""Between 30 and 100, as outliers of large models are, and exact in any dtype."""

KEY_FACTOR = 8.0

Edit = tuple[str, int, int, Tensor]
"""A tensor, its axis, the first channel of that axis that is concerned, and what it and those behind it are multiplied
with."""


def edits(
    family: Family, shape: ModelShape, tensors: Tensors, channels: int, factors: Sequence[float], seed: int
) -> Iterator[Edit]:
    """What to scale. Where a family has no norm in front of its readers, they have nothing that could be scaled; nor
    where gains are stored less 1, which would have to be rounded."""
    if family.experts is not None and family.experts.fused and shape.experts:
        raise typer.BadParameter(f"{family.model_type} has all experts of a block in one tensor, which is not scaled")
    generator = torch.Generator().manual_seed(seed)
    residual = _scale(shape.hidden, channels, factors, generator)
    plan = outline("", shape, family, tensors)
    for index in range(shape.blocks):
        block = list(plan.block(index))
        for norm in dict.fromkeys((family.attention_norm, family.mlp_norm)):
            if norm is not None and family.norm_tensors and not family.norm_offset:
                for leaf in ("weight", "bias"):
                    yield f"{family.layers}.{index}.{norm}.{leaf}", 0, 0, residual
                readers = (linear for linear in block if linear.role in READERS)
                same = (linear for linear in readers if getattr(family, READERS[linear.role]) == norm)
                sources = dict.fromkeys(linear.source for linear in same)  # a fused one is there for every role
                yield from ((source, 1, 0, 1 / residual) for source in sources)
        ups, downs = ([linear for linear in block if linear.role == role] for role in ("up", "down"))
        for up, down in zip(ups, downs, strict=True) if family.gate else ():  # else the activation is between them
            inside = _scale(down.k, channels, factors, generator)
            first = first_row("up", shape, family) if up.expert is None else 0
            yield up.source, 0, first, inside
            yield f"{up.name}.bias", 0, first, inside
            yield down.source, 1, 0, 1 / inside


def key_edits(family: Family, shape: ModelShape, factor: float, seed: int) -> Iterator[Edit]:
    """The same for keys."""
    if family.norms_keys:
        raise typer.BadParameter(f"{family.model_type} has a norm behind its keys, which would take the outliers back")
    generator = torch.Generator().manual_seed(seed)
    heads, readers = torch.arange(shape.kv_heads), shape.heads // shape.kv_heads
    partner, first = balance.partners(shape, family.rope_interleaved), first_row("key", shape, family)
    for index in range(shape.blocks):
        scale = torch.ones(shape.kv_heads, shape.head_dim, dtype=torch.float64)
        chosen = torch.randint(shape.rotary // 2, (shape.kv_heads,), generator=generator)
        scale[heads, chosen] = scale[heads, partner[chosen]] = factor
        keys, queries = scale.flatten(), 1 / scale.repeat_interleave(readers, 0).flatten()
        for name, start, rows in ((family.key, first, keys), (family.query, 0, queries)):
            yield f"{family.layers}.{index}.{name}.weight", 0, start, rows
            yield f"{family.layers}.{index}.{name}.bias", 0, start, rows


def _scale(width: int, channels: int, factors: Sequence[float], generator: torch.Generator) -> Tensor:
    """1 for every channel but a few, which are drawn by chance."""
    scale = torch.ones(width, dtype=torch.float64)
    chosen = torch.randperm(width, generator=generator)[:channels]
    scale[chosen] = torch.tensor(factors, dtype=torch.float64).repeat(len(chosen))[: len(chosen)]
    return scale


def plant(model: str | Path, out: Path, channels: int = 4, factors: Sequence[float] = FACTORS, seed: int = 0) -> Path:
    """Write the model with outliers to the folder `out`, as plain safetensors, one file of the source at a time."""
    return _plant(model, out, lambda row, shape, tensors: edits(row, shape, tensors, channels, factors, seed))


def plant_keys(model: str | Path, out: Path, factor: float = KEY_FACTOR, seed: int = 0) -> Path:
    """The same with outliers in the keys alone."""
    return _plant(model, out, lambda row, shape, _: key_edits(row, shape, factor, seed))


def _plant(model: str | Path, out: Path, what: Callable[[Family, ModelShape, Tensors], Iterator[Edit]]) -> Path:
    checkpoint = Checkpoint.open(source.resolve(str(model)))
    wanted: dict[str, list[tuple[int, int, Tensor]]] = defaultdict(list)
    config = transformers_config(checkpoint)
    family = family_of(checkpoint.config).for_config(config)
    for name, axis, first, factor in what(family, shape_of(config), checkpoint.tensors):
        wanted[name].append((axis, first, factor))
    out.mkdir(parents=True)
    for path in sorted(checkpoint.folder.iterdir()):
        if path.suffix != ".safetensors":
            if path.is_file():
                shutil.copyfile(path, out / path.name)
            continue
        tensors = {name: checkpoint.read(name) for name in read_header(path)[0]}
        for name, tensor in tensors.items():
            scaled = tensor.to(torch.float64, copy=True)
            for axis, first, factor in wanted[name]:
                axis = 1 - axis if family.transposed and tensor.dim() == 2 else axis
                part = scaled.narrow(axis, first, len(factor))
                part *= factor[:, None] if axis == 0 and tensor.dim() == 2 else factor
            tensors[name] = scaled.to(tensor.dtype)
        write_tensors(out / path.name, tensors, {"format": "pt"})
    return out


def main(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a hub name, or `demo`.")],
    out: Annotated[Path, typer.Argument(help="Folder of the result; must not exist.")],
    channels: Annotated[int, typer.Option(help="Channels of each kind that become outliers.")] = 4,
    factor: Annotated[list[float] | None, typer.Option(help="Repeatable.  [default: 32, 64; keys: 8]")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Plant them in the keys, and nowhere else.")] = False,
    seed: Annotated[int, typer.Option(help="Of the choice of channels.")] = 0,
) -> None:
    """Write a model that computes the same, with outliers."""
    if keys:
        plant_keys(model, out, factor[0] if factor else KEY_FACTOR, seed)
        print(f"{out}: two channels scaled in every key-value head")
        return
    plant(model, out, channels, factor or FACTORS, seed)
    print(f"{out}: {channels} channels scaled in every norm and between up and down")


if __name__ == "__main__":
    one_sentence.run(main)
