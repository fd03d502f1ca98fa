"""`quantize perplexity`, from a checkout: perplexity of any causal language model by the papers' protocol.

python scripts/perplexity.py demo
python scripts/perplexity.py OUT --against MODEL --dataset wikitext2 --json
"""

import sys

from ptq.cli import app

if __name__ == "__main__":
    app(["perplexity", *sys.argv[1:]], prog_name="quantize")
