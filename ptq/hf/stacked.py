"""Tensors that published files hold in pieces and the model as one, such as the convolutions of queries, keys and
values: read as one, and written so. transformers takes both."""

from collections.abc import Mapping
from dataclasses import replace

from ptq.errors import InputError
from ptq.files.header import TensorInfo
from ptq.models.family import Family
from ptq.planning.plan import OF_ANOTHER


def as_read(tensors: Mapping[str, TensorInfo], family: Family) -> dict[str, TensorInfo]:
    """The tensors of files with one for all pieces of each that is `Family.stacked`. Raises InputError where some of
    them are missing, or do not fit each other."""
    found = dict(tensors)
    for whole, pieces in family.stacked:
        for name in tensors:
            prefix = name.removesuffix(pieces[0])
            if prefix != name and family.block_of(name) is not None:
                found[prefix + whole] = _stacked(tensors, [prefix + piece for piece in pieces])
                for piece in pieces:
                    del found[prefix + piece]
    return found


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
                f"tensor {name!r} has shape {list(info.shape)} and dtype {info.dtype}, which do not go with "
                f"{list(first.shape)} and {first.dtype} of {names[0]!r}: {OF_ANOTHER}"
            )
    shape = (sum(info.shape[0] for info in pieces), *first.shape[1:])
    return replace(first, shape=shape, nbytes=sum(info.nbytes for info in pieces), pieces=tuple(pieces))
