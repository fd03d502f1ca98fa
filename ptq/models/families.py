"""The table of model families: one row of tensor names per Hugging Face `model_type`.

A row says which tensor plays which part; how the parts act together (what reads and writes the residual stream, which
linears share an input) is the same for all of them and is said once, in `ptq.planning.outline` and in the methods'
planners. To add a family, add a row: docs/add-a-family.md. The tests in tests/test_families.py run over the whole
table.
"""

import difflib
import re
from typing import Any

from ptq.errors import InputError
from ptq.models import experts_rows, mixers_rows, plain_rows
from ptq.models.family import Family

FAMILIES: dict[str, Family] = {row.model_type: row for row in (*plain_rows.ROWS, *experts_rows.ROWS, *mixers_rows.ROWS)}

FOR_TEXT = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
"""Models that also read images, with text models of types of their own, and what these are for text alone."""
UNLISTED = {"mistral4": "Mistral4ForCausalLM"}
"""Classes of transformers that make text, and that its `AutoModelForCausalLM` does not know."""


def check_generates(config: dict[str, Any]) -> None:
    """Raise InputError for a classifier, and for a model without a head, as models that embed texts are published."""
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if re.search("(Classification|QuestionAnswering|(?<!LMHead)Model)$", str(name)):
            raise InputError(f"config.json: architectures says {name!r}: only models that generate text are supported")


def family_or_default(config: Any) -> Family:
    """The row of a transformers config; where there is none, one with Llama's names, which most models share."""
    return FAMILIES.get(config.model_type) or Family(config.model_type)


def family_of(config: dict[str, Any]) -> Family:
    """The row of a model. Raises InputError for a `model_type` that has none."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        alike = difflib.get_close_matches(str(model_type), FAMILIES, n=1, cutoff=0.85)
        raise InputError(
            f"config.json: model_type {model_type!r} is not supported{f' (is it {alike[0]}?)' if alike else ''}. A new "
            f"one is one row of a table: see docs/add-a-family.md. Known are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
