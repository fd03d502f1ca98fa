"""A picture of docs/results.md: how much worse each model becomes, by bits per weight.

python scripts/plot_perplexity.py OUT.svg TABLE.json [TABLE.json ...]

The tables are those that `scripts/perplexity_table.py --out` writes.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

STYLES = {
    ("nearest", False): ("RTN", "#9aa0a6", "o--"),
    ("nearest", True): ("RTN, rotated", "#5f6368", "o-"),
    ("gptq", False): ("GPTQ", "#8ab4f8", "s--"),
    ("gptq", True): ("GPTQ, rotated", "#1a56c4", "s-"),
}


def main(out: Path, tables: list[Path]) -> None:
    plt.rcParams.update({"svg.hashsalt": "ptq", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, len(tables), figsize=(4.2 * len(tables), 3.2), sharey=True, squeeze=False)
    for axis, path in zip(axes[0], tables, strict=True):
        table = json.loads(path.read_text())
        for (rounding, rotate), (label, colour, style) in STYLES.items():
            wanted = {"rounding": rounding, "rotate": rotate, "group_size": 0, "symmetric": True}
            cells = [cell for cell in table["cells"] if wanted.items() <= cell.items()]
            bits = [cell["bits_per_weight"] for cell in cells]
            worse = [100 * max(cell["perplexity"] / table["original"] - 1, 1e-4) for cell in cells]
            axis.plot(bits, worse, style, color=colour, label=label, markersize=4, linewidth=1.4)
        axis.set_yscale("log")
        axis.set_ylim(1e-2, 2e3)
        axis.set_title(f"{Path(table['model']).name}: perplexity {table['original']:.2f}", fontsize=9)
        axis.set_xlabel("bits per weight, scales included")
        axis.grid(axis="y", color="#e8eaed")
    axes[0][0].set_ylabel("perplexity above the original, %")
    axes[0][-1].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
