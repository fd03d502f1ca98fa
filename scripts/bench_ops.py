"""How fast the ops are on this machine, next to what the memory allows and to torch.

python scripts/bench_ops.py                     everything
python scripts/bench_ops.py --only 'hadamard.*4096' --threads 1
python scripts/bench_ops.py --only 'linear.*batch 16$' --json

INT8 and INT4 name the activations of a linear layer; its time includes quantising them, torch's dynamic INT8 (oneDNN,
float32 input) includes its own. bfloat16 activations are not quantised. Weights have 4 bits, unless the title says
otherwise. `peer_cases.py` puts the same layers beside other programs.

Cases of one table line run in turns, many rounds of a tenth of a second, in a new order every round: a ratio is the
median of the ratios within a round, so that a noisy machine disturbs both sides alike. Read ratios, not microseconds.
Weights go round through a pool that no cache holds, as they do in a model.
"""

import json
import os
import re
from dataclasses import asdict
from typing import Annotated

import bench_attention
import bench_e8p
import bench_experts
import bench_hadamard
import bench_integer
import bench_minifloat
import one_sentence
import torch
import typer
from bench_case import measure

from ptq.ops import native

MODULES = (bench_hadamard, bench_integer, bench_e8p, bench_minifloat, bench_experts, bench_attention)
"""Each has `tables()`: what it can measure."""


def main(
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = len(os.sched_getaffinity(0)),
    rounds: Annotated[int, typer.Option(help="Rounds; medians are printed.")] = 7,
    level: Annotated[str | None, typer.Option(help="CPU kernels of this level; the machine's best.")] = None,
    only: Annotated[str, typer.Option(help="Regular expression on the titles.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object per line.")] = False,
) -> None:
    """Print a Markdown line per case: µs, GB/s, share of the limit, times faster than torch."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    kernels = native.set_cpu_level(level) if native.load() else "not built, slow references"
    if level not in (None, kernels):
        raise typer.BadParameter(f"--level {level}: not here; the best here is {native.set_cpu_level(None)}")
    if not as_json:
        print(f"torch {torch.__version__}, {threads} threads, kernels: {kernels}\n")
        print("| case | | µs | GB/s | of the limit | times faster than |\n|---|---|---|---|---|---|", flush=True)
    for title, limit, make in (table for module in MODULES for table in module.tables()):
        if not re.search(only, title):
            continue
        for line in measure(title, limit, make(), rounds):
            ratios = ", ".join(f"{peer}: {ratio:.2f}" for peer, ratio in line.ratios.items())
            row = (
                line.case,
                line.name,
                f"{line.microseconds:.1f}",
                f"{line.gb_per_second:.1f}",
                f"{line.limit:.2f}",
                ratios,
            )
            print(json.dumps(asdict(line)) if as_json else f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    one_sentence.run(main)
