"""Tensors that published files hold in pieces and the model as one, such as the convolutions of queries, keys and
values, or the other way round: read as the model has them, and written so. transformers takes both."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from math import prod

from ptq.errors import InputError
from ptq.files.dtypes import dtype_name
from ptq.files.header import TensorInfo
from ptq.models.family import Family
from ptq.models.model_shape import ModelShape
from ptq.planning.plan import OF_ANOTHER


def renamed(tensors: Mapping[str, TensorInfo], family: Family) -> dict[str, TensorInfo]:
    """The tensors of files by the names that the row of a family has. Raises InputError where two are one by these."""
    own: dict[str, str] = {}
    for name in tensors:
        new = family.file_name(name)
        if own.setdefault(name if new in tensors else new, name) != name:
            raise InputError(
                f"tensors {own[new]!r} and {name!r} are two names of one tensor; the checkpoint is damaged"
            )
    return {new: tensors[name] for new, name in own.items()}


def as_read(tensors: Mapping[str, TensorInfo], family: Family, shape: ModelShape) -> dict[str, TensorInfo]:
    """The tensors of files with one for all pieces of each that is `Family.stacked`, and three for each that is
    `joined`. Raises InputError where pieces are missing, or do not fit each other or the sizes of config.json."""
    found = dict(tensors)
    for name, info in tensors.items():
        owner, _, leaf = name.rpartition(".")
        if family.joined is not None and owner.endswith(f".{family.joined}") and family.block_of(name) is not None:
            del found[name]
            for linear, rows in zip(
                (family.query, family.key, family.value), _rows_of_qkv(name, info, shape), strict=True
            ):
                found[f"{owner.removesuffix(family.joined)}{linear}.{leaf}"] = rows
    for whole, pieces in family.stacked:
        for name in tensors:
            prefix = name.removesuffix(pieces[0])
            if prefix != name and family.block_of(name) is not None:
                found[prefix + whole] = _stacked(tensors, [prefix + piece for piece in pieces])
                for piece in pieces:
                    del found[prefix + piece]
    return found


def _rows_of_qkv(name: str, info: TensorInfo, shape: ModelShape) -> Iterator[TensorInfo]:
    """Those of queries, of keys and of values in one tensor."""
    counts = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    if not info.shape or info.shape[0] != sum(counts) or info.scale is not None:
        raise InputError(
            f"tensor {name!r} has shape {list(info.shape)}, expected {sum(counts)} rows of 16-bit numbers, those of "
            f"queries, keys and values: {OF_ANOTHER}"
        )
    columns = prod(info.shape[1:])
    for first, count in zip(accumulate(counts, initial=0), counts, strict=False):
        yield info.part(first * columns, (count, *info.shape[1:]))


def _stacked(tensors: Mapping[str, TensorInfo], names: list[str]) -> TensorInfo:
    """Some tensors, one behind the other along their first axis."""
    for name in names[1:]:
        if name not in tensors:
            raise InputError(f"the checkpoint holds tensor {names[0]!r}, but not {name!r}, which belongs to it")
    pieces = [tensors[name] for name in names]
    first = pieces[0]
    for name, info in zip(names, pieces, strict=True):
        if not info.shape or info.shape[1:] != first.shape[1:] or info.dtype != first.dtype or info.scale is not None:
            raise InputError(
                f"tensor {name!r} has shape {list(info.shape)} and dtype {dtype_name(info.dtype)}, which do not go "
                f"with {list(first.shape)} and {dtype_name(first.dtype)} of {names[0]!r}: {OF_ANOTHER}"
            )
    shape = (sum(info.shape[0] for info in pieces), *first.shape[1:])
    return replace(first, shape=shape, nbytes=sum(info.nbytes for info in pieces), pieces=tuple(pieces))
