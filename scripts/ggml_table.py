"""The weights of a model in the types of llama.cpp (ggml) and in ours: how close each comes to the original.

pip install llama-cpp-python gguf
python scripts/ggml_table.py demo
python scripts/ggml_table.py MODEL --text STORIES.txt --only 'Q4|INT4'

All linears of the blocks are rounded, nothing else, and activations are left alone. Ours are runs of `ptq.quantize`,
loaded again. ggml rounds as `llama-quantize --imatrix` has it: its library quantises each weight with the mean squares
of the inputs over the same calibration rows, and the numbers that its codes stand for are put into the model. Where
rows are no whole blocks, zeros are put behind them, and not counted (llama.cpp would take another type there).
Everything else is that of scripts/perplexity_table.py; KL is in nats per token.
"""

import ctypes
import math
import re
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
import one_sentence
import torch
import typer
from jaxtyping import Float
from perplexity_table import Task, group_sizes, load, prepared
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

import ptq
from fp6.plan import Fp6Recipe
from ptq.commands.evaluate import Agreement, compare
from ptq.recipe import Recipe
from ptq.statistics.calibration import load_rows
from quarot.plan import QuarotRecipe
from quip_sharp.plan import QuipSharpRecipe

TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K", "IQ3_S", "IQ3_XXS", "Q2_K",
         "IQ2_S", "IQ2_XS", "IQ2_XXS")  # fmt: skip


class Ggml:
    """ggml, as far as it rounds weights."""

    def __init__(self, folder: Path) -> None:
        found = sorted(folder.glob("libggml-base.so*"))
        if not found:
            raise typer.BadParameter(f"{folder} has no libggml-base.so; install llama-cpp-python, or name its folder")
        library = ctypes.CDLL(str(found[0]))
        self._quantize = library.ggml_quantize_chunk
        self._quantize.restype = ctypes.c_size_t
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._quantize.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]

    def rounded(
        self, type_name: str, weight: Float[Tensor, "n k"], importance: Float[Tensor, " k"]
    ) -> Float[Tensor, "n k"]:
        """What the codes of a weight stand for; `importance`: of each column's errors."""
        kind = gguf.GGMLQuantizationType[type_name]
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        n, k = weight.shape
        padding = -k % block
        w = np.ascontiguousarray(nn.functional.pad(weight.float(), (0, padding)).numpy())
        columns = np.ascontiguousarray(nn.functional.pad(importance.float(), (0, padding)).numpy())
        codes = np.empty((n, w.shape[1] // block * nbytes), np.uint8)
        self._quantize(kind, w.ctypes.data, codes.ctypes.data, 0, n, w.shape[1], columns.ctypes.data)
        return torch.from_numpy(gguf.dequantize(codes, kind))[:, :k].to(weight.dtype)


def linears_of(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """The linears that all methods here round: all but the head."""
    head = model.get_output_embeddings()
    return ((name, x) for name, x in model.named_modules() if isinstance(x, nn.Linear) and x is not head)


def mean_squares(model: PreTrainedModel, task: Task) -> dict[str, Tensor]:
    """Mean square of every input channel of every linear over the calibration rows: llama.cpp's importance matrix."""
    tokenizer = AutoTokenizer.from_pretrained(task.folder)
    rows = load_rows(str(task.calibration), tokenizer, task.samples, task.sequence_length, seed=0)
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].flatten(0, -2).double()
            found[name] = found.get(name, torch.zeros(x.shape[-1], dtype=torch.float64)) + (x * x).sum(0)

        return add

    hooks = [linear.register_forward_pre_hook(watch(name)) for name, linear in linears_of(model)]
    with torch.inference_mode():
        for row in rows:
            model(row[None])
    for hook in hooks:
        hook.remove()
    return {name: total / rows.numel() for name, total in found.items()}


def recipes(task: Task) -> dict[str, Recipe]:
    """Ours, by the name of its row."""
    data: dict[str, Any] = {
        "calibration": str(task.calibration), "samples": task.samples, "sequence_length": task.sequence_length
    }  # fmt: skip
    found: dict[str, Recipe] = {
        "FP6 e2m3, no text": Fp6Recipe(),
        "FP6 e2m3, rotated, mse, no text": Fp6Recipe(rotate=True, scale_search="mse"),
    }
    for bits in (8, 6, 5, 4, 3, 2):
        for group in group_sizes(task.folder)[:3]:
            name = f"QuaRot INT{bits}, " + (f"groups of {group}" if group else "per channel")
            found[name] = QuarotRecipe(weight_bits=bits, group_size=group, gptaq_alpha=0.25, **data)
    for bits in (4, 3, 2):
        plain: dict[str, Any] = {"bits": bits, "activation_bits": 16, **data}
        found[f"QuIP#, {bits} bits"] = QuipSharpRecipe(gptaq_alpha=0.25, **plain)
        found[f"QuIP#, {bits} bits, fine-tuned"] = QuipSharpRecipe(finetune="full", **plain)
    return found


def bits_of(type_name: str) -> float:
    """Bits of a weight, with its scales."""
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    return 8 * nbytes / block


def rounded(task: Task, ggml: Ggml, type_name: str, importance: dict[str, Tensor]) -> PreTrainedModel:
    """The model with all its linears in a type."""
    model = load(task.folder)
    for name, linear in linears_of(model):
        linear.weight.data = ggml.rounded(type_name, linear.weight.data, importance[name])
    return model


def quantized(task: Task, recipe: Recipe, original: PreTrainedModel) -> tuple[float, Agreement]:
    """True bits of a weight, and how close the checkpoint of a recipe comes."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out"
        result = ptq.quantize(task.folder, out, recipe, ptq.RunOptions(progress=False, report=False))
        assert result.bits_per_weight is not None
        return result.bits_per_weight, compare(load(out), original, task.windows)


def line(name: str, bits: float, found: Agreement) -> str:
    percent, error = 100 * math.expm1(found.loss_increase), found.loss_increase_standard_error or math.nan
    growth = f"{percent:+.2f} ± {100 * math.exp(found.loss_increase) * error:.2f}"
    return f"| {name} | {bits:.2f} | {growth} | {found.kl:.5f} | {100 * found.top1:.1f} |"


def main(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, or `demo`.")],
    text: Annotated[Path | None, typer.Option(help="Text to measure on.  [demo: its heldout.txt]")] = None,
    split: Annotated[float, typer.Option(help="The share of TEXT to measure on; the rest calibrates.")] = 0.5,
    context: Annotated[int, typer.Option(help="Tokens per window.")] = 256,
    windows: Annotated[int, typer.Option(help="Windows to measure on at most.")] = 128,
    samples: Annotated[int, typer.Option(help="Calibration rows of --context tokens.")] = 128,
    ggml: Annotated[Path | None, typer.Option(help="Folder of libggml-base.so.  [that of llama-cpp-python]")] = None,
    only: Annotated[str, typer.Option(help="Rows whose name this regular expression finds.")] = "",
) -> None:
    """Print the table as Markdown."""
    if ggml is None:
        package = find_spec("llama_cpp")
        if package is None or package.origin is None:
            raise typer.BadParameter("install llama-cpp-python, or name its folder of libraries with --ggml")
        ggml = Path(package.origin).with_name("lib")
    library = Ggml(ggml)
    with prepared(model, text, None, split, context, windows, samples) as task:
        original = load(task.folder)
        importance = mean_squares(original, task)
        print("| weights | true bits | growth of the perplexity, % | KL | same first choice, % |")
        print("|---" * 5 + "|", flush=True)
        for name in filter(re.compile(only).search, (f"ggml {name}" for name in TYPES)):
            type_name = name.removeprefix("ggml ")
            found = compare(rounded(task, library, type_name, importance), original, task.windows)
            print(line(name, bits_of(type_name), found), flush=True)
        for name, recipe in recipes(task).items():
            if re.search(only, name):
                print(line(name, *quantized(task, recipe, original)), flush=True)


if __name__ == "__main__":
    one_sentence.run(main)
