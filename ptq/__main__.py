"""`python -m ptq`: the `quantize` command."""

from ptq.cli import app

app(prog_name="quantize")
