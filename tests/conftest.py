"""What tests of all kinds need: the command line, models to run it on, damage, levels of the CPU's kernels; and where
the project's shared material lies."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Other processes may hold the cores: OpenMP workers that spin at barriers would then wait for minutes.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pytest
import shape_checks  # noqa: F401  (before all that it makes check its shapes)
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TINY, save_model
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from ptq.cli import app
from ptq.ops import native
from ptq.ops.op_declarations import REFERENCES
from ptq.pipeline import needs
from ptq.planning.plan import LinearPlan, Plan

SHARED = Path(__file__).resolve().parents[2] / "shared"


def by_role(plan: Plan, block: int) -> dict[str, LinearPlan]:
    """What happens to the rows of every role, be they a linear of their own or a part of a fused one."""
    return {part.role: part for linear in plan.block(block) for part in linear.parts or (linear,)}


def spoil_free_memory(count: int) -> None:
    """A new tensor of so many numbers holds NaNs, most likely: a number that an op does not write shows."""
    del [torch.full((count,), torch.nan) for _ in range(8)][:]


@pytest.fixture
def calibration_text(tmp_path: Path) -> Path:
    """Random text, enough for a few dozen short rows."""
    generator = torch.Generator().manual_seed(1)
    path = tmp_path / "calibration.txt"
    path.write_text("".join(chr(c) for c in torch.randint(97, 123, (4000,), generator=generator).tolist()))
    return path


@pytest.fixture
def shared() -> Path:
    """Real models and text, which never go into the project."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent: real models and data are not part of the project")
    return SHARED


@pytest.fixture(scope="module")
def fast() -> Iterator[None]:
    """Whole runs without measuring the machine and without waiting for its disk: neither changes a result."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needs, "_matmul_rate", lambda bfloat16=False: 1e9)
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and one <s> at the start of a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"<s>": 0, **{chr(97 + i): 1 + i for i in range(26)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small Llama. Do not write to it."""
    return save_model(tmp_path_factory.mktemp("tiny") / "model", **TINY)


@pytest.fixture(scope="module")
def packed(tiny: Path) -> Path:
    """The checkpoint that `quantize quarot` has made of it. Do not write to it."""
    out = tiny.with_name("packed")
    assert quantize("quarot", tiny, out, "--rounding", "nearest").exit_code == 0
    return out


def quantize(*arguments: Any) -> Result:
    """The command line, in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every path inside a folder, with the bytes of the files."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


NOTES = ("estimate: ", "lm_head: ", "published in FP8: ", "published in MXFP4: ")


def check_refused(result: Result, message: str, code: int = 2) -> None:
    """One sentence on stderr that says `message`, behind nothing but notes; nothing on stdout, no traceback."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    *notes, line = result.stderr.splitlines()
    assert line.startswith("quantize: ") and all(note.startswith(NOTES) for note in notes)
    assert message in line
    assert "internal error" not in line


def edit_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Damage to the weights of a model folder."""

    def damage(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        edit(content)
        save_file(content, folder / "model.safetensors", {"format": "pt"})

    return damage


def edit_config(**changes: Any) -> Callable[[Path], None]:
    """Damage to the config of a model folder."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


SLOW_PAIRS = "avx512bf16, slow pairs"
LEVELS = (*native.CPU_LEVELS, SLOW_PAIRS)
"""What the native kernels run at: the levels, and one of them as Intel's processors do it."""


def use_level(level: str | None) -> bool:
    """Run the native kernels at one of `LEVELS`, None for the best. Whether this machine has it."""
    native.set_slow_pairs({"avx512bf16": False, SLOW_PAIRS: True}.get(level or ""))
    name = level and level.partition(",")[0]
    return native.set_cpu_level(name) == name


def at_level(level: str) -> Iterator[str]:
    """What a fixture yields from: the native kernels at one of `LEVELS`; skips where there are none."""
    if not native.load():
        pytest.skip("native kernels are not built")
    try:
        if not use_level(level):
            pytest.skip(f"this machine has no {level}")
        yield level
    finally:
        use_level(None)


Ops = Mapping[str, Callable[..., Any]]


def ops_at(level: str) -> Iterator[Ops]:
    """What a fixture yields from: the ops of one implementation, `reference` or the native kernels of a level."""
    if level == "reference":
        yield REFERENCES
        return
    for _ in at_level(level):
        yield {name: getattr(torch.ops.ptq, name) for name in REFERENCES}


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The native kernels at one level after the other."""
    yield from at_level(request.param)


@pytest.fixture
def set_level() -> Iterator[Callable[[str | None], str]]:
    """Sets a CPU level for one test."""
    yield native.set_cpu_level
    if native.load():
        native.set_cpu_level(None)
