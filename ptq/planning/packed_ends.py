"""How a plan packs the ends of a model, its embedding and its head."""

from dataclasses import replace

from ptq.planning.plan import Plan
from ptq.weights import formats

GROUPS = {8: (128, 64, 32), 6: (128, 64, 32), 4: (32,)}
"""Group sizes by the bits: the first that divides the rows is taken; where none does, rows have one scale each. At 4
bits smaller groups pay (docs/results.md)."""


def packed(plan: Plan, bits: int) -> Plan:
    """The plan with embedding and head in integers of `bits` bits, rounded to the nearest; 16: the plan as it is."""
    if bits == 16:
        return plan
    ends = {linear.name for linear in plan.ends()}

    def group(k: int) -> int:
        return next((size for size in GROUPS[bits] if k % size == 0), 0)

    return replace(
        plan,
        linears=tuple(
            replace(linear, format=formats.get("quarot/integer", bits=bits, group_size=group(linear.k)))
            if linear.name in ends
            else linear
            for linear in plan.linears
        ),
    )
