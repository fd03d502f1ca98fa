"""Rotations that leave the model's function as it is (Ashkboos et al. 2024, section 4; R1 to R4 as SpinQuant names
them), put onto a plan.

- R1 turns the residual stream: fused into the embedding, into every linear that reads the stream (with the norm's gain)
  and into every linear that writes it. Where the head is the embedding's own weight, that stays as it is, and R1 runs
  online behind the embedding and, backwards, in front of the last norm; but norms without gains leave both alike.
- R2 turns each value head: fused into v_proj's output and, per query head, into o_proj's input. One per layer: its
  signs are the same in every head, so grouped-query attention needs no special case.
- R3 turns queries and keys after RoPE, when the model runs: nothing of it is in the weights, nor here
  (`ptq.kv.kv_cache`).
- R4 turns the input of down_proj. Its Hadamard part runs online, its signs vanish into up_proj: act(gate) * (s up).
  MLPs without a gate, and experts with another one, have it without signs. What mixes tokens in the place of plain
  attention has no R2, but the same in front of its output, without signs.
"""

from collections.abc import Iterator
from dataclasses import replace

from ptq.errors import InputError
from ptq.models.family import Family
from ptq.models.model_shape import ModelShape
from ptq.ops import hadamard
from ptq.planning.outline import first_row
from ptq.planning.plan import Balance, KeyBalance, LinearPlan, Plan, Rotation

READERS = {
    "query": "attention_norm",
    "key": "attention_norm",
    "value": "attention_norm",
    "gate": "mlp_norm",
    "up": "mlp_norm",
    "router": "mlp_norm",
    "shared_gate": "mlp_norm",
    "latent_input": "mlp_norm",
    "mixer_input": "attention_norm",
    "mixer_gate": "attention_norm",
}
"""Roles that read the residual stream, and the field of `Family` that names the norm in front of them."""
WRITERS = ("attention_output", "mixer_output", "down", "latent_output")


def check_rotated(plan: Plan, remedy: str) -> None:
    """Raise InputError, which ends in a remedy, for a plan in which nothing is rotated."""
    if not any(linear.input or linear.output or linear.online for linear in plan.linears):
        raise InputError(
            "there is nothing to rotate: no rotation that vanishes into the weights passes the norms, or the fused "
            f"linears, of this model; {remedy}"
        )


def rotated(plan: Plan, shape: ModelShape, family: Family, *, online: bool, keep_tied: bool) -> Plan:
    """The outline `plan` with R1 and R2, and with R4 if `online`. `keep_tied`: a tied head stays tied, which takes R1
    online; otherwise it becomes a weight of its own."""
    residual = Rotation(shape.hidden, hadamard.largest_block(shape.hidden), "R1") if family.rotate_residual else None
    tied = shape.tied and residual is not None and family.norm_tensors  # without a gain the ends are rotated alike
    untied, kept_tied = tied and not keep_tied, tied and keep_tied
    embedding, *others = plan.ends()
    if untied:
        others.append(replace(embedding, name=family.head, role="head"))
    inside = [_r2(linear, shape) for linear in plan.linears if linear.block is not None]
    if online:
        inside = list(_r4(inside, shape, family))
    if residual is not None:
        latent = {linear.name for linear in inside if shape.latent and linear.expert is not None}
        inside = [linear if linear.name in latent else _r1(linear, family, residual) for linear in inside]
    if residual is not None and not kept_tied:
        embedding, *others = (_r1(linear, family, residual) for linear in (embedding, *others))
    folded = family.norms(shape.blocks, last=not kept_tied) if residual else ()
    rewritten = {*folded, f"{family.head}.bias"} if untied else {*folded}  # the head is now a linear
    return replace(
        plan,
        linears=(embedding, *inside, *others),
        unit_norms=folded,
        kept=tuple(name for name in plan.kept if name not in rewritten),
        untied=untied,
        online_residual=residual if kept_tied else None,
        signs=_sign_lengths(inside, shape, residual),
        notes=(*plan.notes, *_notes(shape, family, online, untied)),
    )


def _r1(linear: LinearPlan, family: Family, residual: Rotation) -> LinearPlan:
    if linear.role in WRITERS:
        return replace(linear, output=residual)
    if linear.role == "embedding":  # its rows are residual vectors e -> R e: the input side of a [vocab, hidden] matrix
        return replace(linear, input=residual)
    if linear.role == "head":
        return replace(linear, input=residual, norm=f"{family.final_norm}.weight" if family.norm_tensors else None)
    if linear.role not in READERS:
        return linear
    norm = getattr(family, READERS[linear.role])
    gain = f"{family.layers}.{linear.block}.{norm}.weight" if norm and family.norm_tensors else None
    return replace(linear, input=residual, norm=gain)


def _r2(linear: LinearPlan, shape: ModelShape) -> LinearPlan:
    order = hadamard.largest_block(shape.head_dim)
    if linear.role == "value":
        return replace(linear, output=Rotation(shape.kv_heads * shape.head_dim, order, f"R2.{linear.block}"))
    if linear.role == "attention_output":
        return replace(linear, input=Rotation(shape.heads * shape.head_dim, order, f"R2.{linear.block}"))
    return linear


def _r4(linears: list[LinearPlan], shape: ModelShape, family: Family) -> Iterator[LinearPlan]:
    """Every up with signs, and every down with R4. The experts of a block have the same: nothing mixes them. The MLP
    beside them, of another width, has signs of its own. Without signs: outputs of mixers, and MLPs and experts that
    would not pass them on."""
    plain_gate = family.experts is None or (family.experts.plain_gate and family.experts.gate is not None)
    sources = {(_mlp(linear), linear.role): linear.source for linear in linears}
    for linear in linears:
        without_signs = family.gate is None if linear.expert is None else not plain_gate
        if linear.role == "mixer_output" or (linear.role == "down" and without_signs):
            online = Rotation(linear.k, hadamard.largest_block(linear.k))
            yield replace(linear, input=online, online=online)
            continue
        if linear.role not in ("up", "down") or without_signs:
            yield linear
            continue
        index = linear.block
        assert index is not None
        shared = linear.expert is None and shape.has_experts(index)
        size, signs = linear.n if linear.role == "up" else linear.k, f"R4.{index}.shared" if shared else f"R4.{index}"
        order = hadamard.largest_block(size)
        up, down = (sources[_mlp(linear), role] for role in ("up", "down"))
        balance = Balance(up, down, first_row("up", shape, family) if linear.expert is None else 0)
        if linear.role == "up":
            yield replace(linear, output=Rotation(size, 1, signs), balance=balance)
        else:
            online = Rotation(size, order)
            yield replace(linear, input=Rotation(size, order, signs), online=online, balance=balance)


def _mlp(linear: LinearPlan) -> str:
    """The MLP, or the expert, that a linear belongs to."""
    return linear.name.rpartition(".")[0]


def keys_balanced(plan: Plan, shape: ModelShape, family: Family) -> Plan:
    """The plan with a balance of queries and keys; as it is where the family norms queries and keys, which would undo
    the balance."""
    norm = family.attention_norm
    if norm is None or family.norms_keys or not family.norm_tensors:
        return plan

    def balanced(linear: LinearPlan) -> LinearPlan:
        if linear.role not in ("query", "key"):
            return linear
        block = f"{plan.layers}.{linear.block}"
        query, key = f"{block}.{family.query}", f"{block}.{family.key}"
        gain, first = f"{block}.{norm}.weight", first_row("key", shape, family)
        return replace(linear, balance=KeyBalance(query, key, gain, shape, family.rope_interleaved, first))

    return replace(plan, linears=tuple(balanced(linear) for linear in plan.linears))


def _sign_lengths(linears: list[LinearPlan], shape: ModelShape, residual: Rotation | None) -> dict[str, int]:
    lengths = {"R1": shape.hidden} if residual else {}
    online = [(linear.block, linear.input) for linear in linears if linear.online is not None]
    for index in range(shape.blocks):
        if any(linear.role == "value" and linear.block == index for linear in linears):
            lengths[f"R2.{index}"] = shape.head_dim
        inside = (rotation for block, rotation in online if block == index)
        lengths |= {rotation.signs: rotation.size for rotation in inside if rotation and rotation.signs}
    return lengths


def _notes(shape: ModelShape, family: Family, online: bool, untied: bool) -> Iterator[str]:
    if untied:
        yield (
            f"{family.head}: takes the gain of the last norm, so it is no longer the embedding's own weight: "
            f"{shape.vocab} x {shape.hidden} numbers more than in the source "
            f"({2e-6 * shape.vocab * shape.hidden:.1f} MB in 16 bits)"
        )
    if not family.rotate_residual:
        yield f"{family.model_type}: R1 (the residual rotation) does not pass its norms, and is left out"
    widths = {"hidden_size": shape.hidden, "head_dim": shape.head_dim}
    yield from block_notes(widths | (mlp_widths(shape) if online else {}))


def mlp_widths(shape: ModelShape) -> dict[str, int]:
    """The widths of the MLPs of a model, and of its experts, by what to call them."""
    widths = {
        "intermediate_size": shape.intermediate if any(map(shape.has_plain_mlp, range(shape.blocks))) else 0,
        "width of an expert": shape.expert_width,
        "width of the shared MLP": shape.shared_width,
    }
    return {name: width for name, width in widths.items() if width}


def block_notes(widths: dict[str, int]) -> Iterator[str]:
    """A sentence for every width that no single Hadamard matrix covers."""
    for name, width in widths.items():
        order = hadamard.largest_block(width)
        if order != width:
            blocks = f"{width // order} blocks of order {order}"
            yield f"{name} {width}: no Hadamard matrix of that order can be built; {blocks} mix fewer channels"
