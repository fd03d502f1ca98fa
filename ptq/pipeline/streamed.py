"""A model, plain or packed, that runs from its files with one part of it in memory at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from ptq.errors import in_folder
from ptq.files.checkpoint import Checkpoint
from ptq.hf import residual
from ptq.hf.blocks import PartialModel, row_by_row
from ptq.hf.meta_model import check_whole, transformers_config
from ptq.hf.packed_config import QUANT_METHOD, PtqConfig
from ptq.models.families import family_of
from ptq.models.family import Family
from ptq.pipeline import ends, target
from ptq.pipeline.ends import Matrix
from ptq.planning.outline import joined, outline


@dataclass(frozen=True)
class Streamed:
    """Computes in float32, a row at a time: a packed model to the same bits as when it is loaded."""

    checkpoint: Checkpoint
    """Its tensors by the names that the family's row has for them, or that the model has."""
    config: Any
    """Its transformers config."""
    family: Family
    packed: PtqConfig | None = None
    """None: a plain model."""
    unused: frozenset[str] = frozenset()
    """Tensors that the model does not read."""
    device: torch.device = torch.device("cpu")

    @classmethod
    def open(cls, folder: Path) -> "Streamed":
        """The model of a folder. Raises InputError as `target.opened` does, and for a plain model whose tensors are not
        those that its config promises."""
        checkpoint = Checkpoint.open(folder)
        stated = checkpoint.config.get("quantization_config")
        if isinstance(stated, dict) and stated.get("quant_method") == QUANT_METHOD:
            with in_folder(folder):
                config = transformers_config(checkpoint)
                family = family_of(checkpoint.config).for_config(config)
                check_whole(checkpoint, family)
                return cls(checkpoint, config, family, PtqConfig.parse(checkpoint.config))
        found = target.opened(str(folder))
        plan = outline("", found.shape, found.family, found.checkpoint.tensors)
        target.check(found, replace(plan, linears=joined(plan.linears)))
        return cls(found.checkpoint, found.config, found.family, unused=frozenset(plan.unused))

    @property
    def blocks(self) -> int:
        """Number of decoder blocks."""
        return self.config.num_hidden_layers

    def embed(self, ids: Int[Tensor, "rows t"]) -> Float[Tensor, "rows t w"]:
        """The state that enters the first block."""
        part, inputs = self._ends(), self.family.layer_inputs
        names = [self.family.embedding]
        if inputs is not None and f"{inputs.embedding}.weight" in self.checkpoint.tensors:
            names.append(inputs.embedding)
        part.load(self._read(self.family.beside_embedding(len(names) > 1)))
        return ends.embed(part, ids, lambda used: {f"{name}.weight": self._rows(part, name, used) for name in names})

    def run(self, index: int, state: Float[Tensor, "rows t w"]) -> Float[Tensor, "rows t left"]:
        """The state that leaves a block."""
        part = PartialModel(self.config, self.family, index, self.device)
        if self.packed is not None:
            part.pack(self.packed.entries())
            part.quantize_cache(self.packed.cache())
        part.load(self._read(name for name in self.checkpoint.tensors if name.startswith(part.prefix)))
        return row_by_row(part, state)

    def logits(self, state: Float[Tensor, "rows t w"]) -> Iterator[Float[Tensor, "1 t v"]]:
        """Logits of every row from the state that leaves the last block."""
        names = {name.rpartition(".weight")[0] for name in self.checkpoint.tensors.keys() - self.unused}
        head = self.family.head if self.family.head in names else self.family.embedding
        last = self._read(name for name in ends.final_tensors(self.family) if name in self.checkpoint.tensors)
        return ends.logits(self._ends(), self._matrix(head), last, state)

    def _ends(self) -> PartialModel:
        """A part without a block, for the embedding and the head."""
        part = PartialModel(self.config, self.family, None, self.device)
        if self.packed is not None and (turned := self.packed.residual()) is not None:
            residual.install(part.model, turned)
            part.load(self._read(residual.tensors(self.family)))
        return part

    def _rows(self, part: PartialModel, name: str, used: Int64[Tensor, " u"]) -> Float[Tensor, "u k"]:
        """Some rows of an embedding."""
        module = part.module(self.family.module_name(name))
        assert isinstance(module, nn.Embedding)
        return self._matrix(name).rows(used, module.embedding_dim)

    def _matrix(self, name: str) -> Matrix:
        """The embedding or the head."""
        names = (tensor for tensor in self.checkpoint.tensors if tensor.startswith(f"{name}.weight"))
        entry = self.packed.entries().get(name) if self.packed is not None else None
        return Matrix({tensor.rpartition(".")[2]: value for tensor, value in self._read(names).items()}, entry)

    def _read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors that are read. Raises InputError for one that is not finite."""
        return {name: self.checkpoint.read_checked(name) for name in names if name not in self.unused}
