"""The rows of llama.cpp in scripts/bench_generate.py: a Llama as a GGUF file, and how fast llama.cpp decodes with it.

pip install llama-cpp-python gguf

The file has no tokenizer, and the types that llama.cpp gives it by itself: in Q4_K_M, some are Q6_K.
"""

import ctypes
import json
import os
import resource
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np
import plain_gguf
import torch

LLAMA: Any = llama_cpp
QUIET = LLAMA.llama_log_callback(lambda *_: None)
LLAMA.llama_log_set(QUIET, None)
PREFILL = 512
"""Tokens that are multiplied at once: llama.cpp's default."""


def made(model: Path, folder: Path, type_name: str) -> Path:
    """The GGUF file of a Llama in a type, in a folder; made where it is not there yet."""
    out = folder / f"{model.name}-{type_name}.gguf"
    if out.exists():
        return out
    partial = out.with_suffix(".partial")
    if type_name == "BF16":
        plain_gguf.write(model, partial)
    else:
        params = LLAMA.llama_model_quantize_default_params()
        params.ftype = getattr(LLAMA, f"LLAMA_FTYPE_MOSTLY_{type_name}")
        source = str(made(model, folder, "BF16")).encode()
        if LLAMA.llama_model_quantize(source, str(partial).encode(), ctypes.byref(params)):
            raise SystemExit(f"llama.cpp made no {type_name} of {model}")
    return partial.rename(out)


def bytes_per_token(path: Path) -> int:
    """Bytes of all weights that a token reads: of its experts, and of the embedding only where it is the head, too."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    total = sum(tensors.values())
    experts = sum(nbytes for name, nbytes in tensors.items() if "_exps." in name)
    if experts:
        architecture = reader.fields["general.architecture"].contents()
        used, count = (reader.fields[f"{architecture}.expert_{key}"].contents() for key in ("used_count", "count"))
        total -= experts - experts * used // count
    return total


class Decoder:
    """A model of llama.cpp, and rows of tokens that are decoded at once."""

    def __init__(self, path: Path, length: int, rows: int, threads: int) -> None:
        LLAMA.llama_backend_init()
        self.model = LLAMA.llama_model_load_from_file(str(path).encode(), LLAMA.llama_model_default_params())
        params = LLAMA.llama_context_default_params()
        params.n_ctx, params.n_seq_max = length * rows, rows
        params.n_batch = params.n_ubatch = PREFILL
        params.n_threads = params.n_threads_batch = threads
        # With flash attention, its default, tokens behind 1024 others take 1.7 times as long, prompts 0.9 times.
        params.flash_attn_type = LLAMA.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = LLAMA.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit(f"llama.cpp does not load {path}")
        self.vocabulary = LLAMA.llama_vocab_n_tokens(LLAMA.llama_model_get_vocab(self.model))
        self.rows = rows
        self.batch = LLAMA.llama_batch_init(PREFILL, 0, 1)
        self.forget()

    def forget(self) -> None:
        """Begin anew, with an empty cache."""
        LLAMA.llama_memory_clear(LLAMA.llama_get_memory(self.context), True)

    def logits(self, ids: np.ndarray, start: int) -> np.ndarray:
        """The last logits of every row, of `ids` [rows, tokens] behind `start` tokens."""
        found = []
        pieces = [ids] if ids.shape[1] == 1 else [row[None] for row in ids]  # prompts: row by row
        for number, piece in enumerate(pieces):
            first = 0 if len(pieces) == 1 else number
            for begin in range(0, piece.shape[1], PREFILL):
                part = piece[:, begin : begin + PREFILL]
                at = self._fill(part, start + begin, first, begin + part.shape[1] == piece.shape[1])
                if LLAMA.llama_decode(self.context, self.batch):
                    raise SystemExit("llama.cpp does not decode")
            found += [
                np.ctypeslib.as_array(LLAMA.llama_get_logits_ith(self.context, i), (self.vocabulary,)).copy()
                for i in at
            ]
        return np.stack(found)

    def _fill(self, ids: np.ndarray, start: int, first_row: int, is_last: bool) -> list[int]:
        """Fill the batch; where in it the last tokens of the rows are."""
        batch, at = self.batch, []
        batch.n_tokens = ids.size
        for number, (row, column) in enumerate(np.ndindex(ids.shape)):
            batch.token[number], batch.pos[number] = int(ids[row, column]), start + column
            batch.n_seq_id[number], batch.seq_id[number][0] = 1, first_row + row
            wanted = is_last and column == ids.shape[1] - 1
            batch.logits[number] = wanted
            if wanted:
                at.append(number)
        return at


def measured(path: Path, context: int, new_tokens: int, rows: int, padded: int) -> None:
    """As `measured` of scripts/bench_generate.py, of rows without padding."""
    if padded:
        raise SystemExit("rows of llama.cpp have no padding")
    threads = int(os.environ["OMP_NUM_THREADS"])
    decoder = Decoder(path, context + new_tokens + 1, rows, threads)
    ids = torch.randint(decoder.vocabulary, (rows, context), generator=torch.Generator().manual_seed(0)).numpy()
    print(json.dumps({"bytes": bytes_per_token(path)}), flush=True)
    for _ in sys.stdin:
        decoder.forget()
        times = [time.perf_counter()]
        logits = decoder.logits(ids, 0)
        times.append(time.perf_counter())
        for step in range(new_tokens):
            logits = decoder.logits(logits.argmax(-1, keepdims=True), context + step)
            times.append(time.perf_counter())
        steps = [b - a for a, b in zip(times[1:], times[2:], strict=False)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        size = LLAMA.llama_state_seq_get_size(decoder.context, 0) * rows
        print(json.dumps({"prefill": times[1] - times[0], "token": median(steps), "peak": peak, "cache": size}),
              flush=True)  # fmt: skip


if __name__ == "__main__":
    measured(Path(sys.argv[1]), *map(int, sys.argv[2:]))
