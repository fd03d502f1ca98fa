"""A row of the table of model families: which tensor plays which part (`ptq.models.families`; docs/add-a-family.md)."""

from dataclasses import dataclass, replace
from typing import Any

Renamings = tuple[tuple[str, str], ...]
"""Pieces of dotted names, and what stands in their place somewhere else."""


@dataclass(frozen=True)
class ExpertNames:
    """Names of the parts of a mixture of experts in the files of a checkpoint, relative to the block.

    Expert e is the MLP of `<experts>.<e>.<gate>` and so on; the router is a matrix with a row for every expert. How its
    product with a token becomes a choice of experts is left to the model's own code.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str | None = "gate_proj"
    """None where an expert is `down(act(up(x)))`, and so the shared MLP."""
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str | None = None
    """The MLP beside the experts, which every token passes; None where no model of the family has one."""
    shared_linears: tuple[str | None, str, str] | None = None
    """What gate, up and down are called in that MLP, one name for both where they are fused; None: as in experts."""
    shared_gate: str | None = None
    """The linear of one row that says how much the shared MLP counts for a token; None where it always counts as 1."""
    latent: tuple[str, str] = ("", "")
    """The linears in front of all experts and behind their sum, in models whose experts work on fewer channels than
    `hidden_size` (`ModelShape.latent`)."""
    kept: tuple[str, ...] = ()
    """Other tensors of a block with experts, such as what is added to the router's scores before the choice."""
    fused: bool = False
    """Whether models are published with all experts of a block in one tensor. That is then the only form in which
    transformers reads plain experts, so they cannot be written one by one."""
    transposed: bool = False
    """Whether matrices in transformers' fused tensors are [inputs, outputs]; False: [outputs, inputs]."""
    interleaved: bool = False
    """Whether outputs of gate and of up take turns in a fused tensor, gate first; False: all of gate, then all of up.
    """
    plain_gate: bool = True
    """False where an expert makes more of the products of gate and up than act(gate) * up, such as a clamp: signs and
    scales of up would not come out at down."""
    logits: int = 0
    """The place of the logits in what the router's module gives, should that be a tuple."""

    @property
    def linears(self) -> tuple[str, ...]:
        """What gate, where there is one, up and down are called inside an expert."""
        return tuple(name for name in (self.gate, self.up, self.down) if name)


@dataclass(frozen=True)
class Mixer:
    """A mixer: what mixes tokens in the place of plain attention, or beside it, such as linear attention, a
    convolution, or attention over a latent vector or with a gate. The fields name its linears, by what they read and
    write, and its other tensors. What it computes between its linears is left to the model's own code.
    """

    readers: tuple[str, ...]
    """Linears on the output of `Family.attention_norm`. A block that has the first one has this mixer."""
    output: str
    """The linear whose product is added to the residual stream."""
    inside: tuple[str, ...] = ()
    """Linears on inputs of their own."""
    gates: tuple[str, ...] = ()
    """Other linears on the output of that norm, with few rows, each of which decides for a whole head: they stay in
    16 bits, as a router does."""
    kept: tuple[str, ...] = ()
    """Its other tensors, which no rotation touches."""
    optional: tuple[str, ...] = ()
    """Likewise, of which some blocks, or models, have none."""
    beside: bool = False
    """Whether its block has plain attention, too, on the output of the same norm; what both give is added."""


@dataclass(frozen=True)
class LayerInputs:
    """Names of what gives every block, beside the hidden states h, an input of its own for each token (Gemma 4). The
    first three belong to the model, the others to every block: `output(act(gate(h)) * input)`, normed, is added to h.
    """

    embedding: str = "model.embed_tokens_per_layer"
    """A table with a row for each token; a row holds one piece for every block."""
    projection: str = "model.per_layer_model_projection"
    """The linear that makes pieces of the same sizes from the embedded token, to be added to those of the table. It
    stays in 16 bits, and so does `norm`, behind it."""
    norm: str = "model.per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    output: str = "per_layer_projection"
    kept: tuple[str, ...] = ("post_per_layer_input_norm.weight",)

    @property
    def made_by(self) -> tuple[str, str]:
        """The tensors beside the embedding of which the inputs are made."""
        return f"{self.projection}.weight", f"{self.norm}.weight"


@dataclass(frozen=True)
class Family:
    """Names of the parts of a decoder-only model: norms, attention or another mixer, an MLP.

    Names of parts inside a block are relative to the block. The defaults are those of Llama. Query, key and value, and
    gate and up, may name the same linear: a fused one, whose rows stand in this order. Both norms of a block may be the
    same one. Where a norm has a bias, it is found by itself.
    """

    model_type: str
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    positions: str | None = None
    """The table whose rows are added to those of the embedding, by place in the text; it stays in 16 bits. None: places
    are known in attention alone."""
    final_norm: str = "model.norm"
    """The norm behind the last block. It is there in every model; of some it has no tensors (`norm_tensors`)."""
    head: str = "lm_head"
    attention_norm: str | None = "input_layernorm"
    """The norm whose output query, key and value read; None where they read the residual stream itself."""
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    attention_output: str = "self_attn.o_proj"
    mlp_norm: str | None = "post_attention_layernorm"
    """The norm whose output gate and up read; None where they read the residual stream itself."""
    gate: str | None = "mlp.gate_proj"
    """The linear inside the activation; None where there is no gate, but `down(act(up(x)))`."""
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    transposed: bool = False
    """Whether the linears of blocks are stored as [k, n], in files and in transformers (its `Conv1D`)."""
    kept: tuple[str, ...] = ()
    """Other tensors of a block, which no rotation touches: q_norm and k_norm have gains per head and stay."""
    kept_if: str | None = None
    """A setting of config.json: models in which it is false have none of the tensors `kept`, and no `plain_key_norm`.
    None: all have them."""
    norm_offset: float = 0.0
    """What norms add to their stored gain: 1 for Gemma, which stores g - 1."""
    norm_tensors: bool = True
    """False where no norm has a gain."""
    plain_key_norm: bool = False
    """Whether keys are normed without a gain, so that no tensor among `kept` says it."""
    rope_interleaved: bool = False
    """RoPE turns channels 2 i and 2 i + 1 of a head together; False: i and i + d / 2 of the d that it turns."""
    rotate_residual: bool = True
    """False where R1 is invalid: norms that subtract a mean (LayerNorm), or something that acts on a block's output
    before it is added, such as a norm with a gain."""
    plain_attention: bool = True
    """False where attention is more than softmax(q k + mask) v, such as sinks that are learned: no packed KV cache."""
    needs_bos: bool = False
    """Whether models were never trained without the beginning-of-sequence token in front, and predict little of sense
    without it: windows of text begin with it when a run is calibrated, and when perplexity is measured."""
    returns_pair: bool = False
    """Whether a block returns a tuple, with the hidden states in front; no block needs the rest."""
    renamed: Renamings = ()
    """Pieces of names in the files, and what transformers calls them in the model: it renames tensors when it loads
    them, one pair after the other."""
    published: Renamings = ()
    """Pieces of names in published files alone, and what they are called in this row and in all that a run writes."""
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Tensors of a block that published files hold in pieces, by rows, and the names of these in their order."""
    joined: str | None = None
    """What published files call one tensor with the rows of `query`, `key` and `value`, where the model has three."""
    unused: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    """Tensors of a block that old checkpoints carry and no model reads."""
    experts: ExpertNames | None = None
    """What the blocks with experts have in the place of gate, up and down; None where no block has any."""
    mixers: tuple[Mixer, ...] = ()
    """What blocks may have in the place of query, key, value and attention_output, or beside them: it has no R2, and
    there is no packed KV cache."""
    own_keys: tuple[str, ...] = ()
    """Tensors that are not read in blocks which take keys and values over from an earlier block, where a checkpoint
    holds them all the same."""
    gguf: str | None = None
    """What llama.cpp calls it, where its files were tried (`quantize export --gguf`)."""
    layer_inputs: LayerInputs | None = None
    """The inputs that blocks have of their own, in those models of the family that have them
    (`ModelShape.layer_input`)."""

    def for_config(self, config: Any) -> "Family":
        """The row as a model with this transformers config has it."""
        has_them = self.kept_if is None or getattr(config, self.kept_if)
        return self if has_them else replace(self, kept=(), plain_key_norm=False)

    def module_name(self, name: str) -> str:
        """What a model calls a linear, or a tensor, of its checkpoint's files."""
        for in_files, in_model in self.renamed:
            if not (_holds(in_model, in_files) and _holds(name, in_model)):  # else it is the model's name already
                name = _replaced(name, in_files, in_model)
        return name

    def file_name(self, name: str) -> str:
        """What the files of a run call a tensor of published files, which may also have the name that it has in the
        model."""
        for published, own in self.published:
            name = _replaced(name, published, own)
        for in_files, in_model in reversed(self.renamed):
            if _holds(in_model, in_files) or not _holds(name, in_files):  # a longer name may begin like the model's
                name = _replaced(name, in_model, in_files)
        return name

    def block_of(self, name: str) -> int | None:
        """The number of the block that a tensor or a linear is in; None where it is in none."""
        number, _, rest = name.removeprefix(f"{self.layers}.").partition(".")
        return int(number[:10]) if rest and number.isdecimal() and name.startswith(f"{self.layers}.") else None

    @property
    def norms_keys(self) -> bool:
        """Whether keys are normed, before RoPE or after it: scales of their channels would vanish, or do harm."""
        gains = (".k_norm.weight", ".key_layernorm.weight")
        return self.plain_key_norm or any(name.endswith(gains) for name in self.kept)

    def beside_embedding(self, layer_inputs: bool) -> tuple[str, ...]:
        """The tensors of which the state that enters the first block is made, beside those with a row for each token:
        the table of positions and, if blocks have inputs of their own, what makes these."""
        inputs = self.layer_inputs.made_by if self.layer_inputs is not None and layer_inputs else ()
        return *inputs, *((f"{self.positions}.weight",) if self.positions else ())

    def norms(self, blocks: int, last: bool = True) -> tuple[str, ...]:
        """The gains of the norms whose output linears read, of so many blocks; `last`: that of the head's too."""
        if not self.norm_tensors:
            return ()
        inside = dict.fromkeys(norm for norm in (self.attention_norm, self.mlp_norm) if norm)
        found = [f"{self.layers}.{index}.{norm}.weight" for index in range(blocks) for norm in inside]
        return (*found, f"{self.final_norm}.weight") if last else tuple(found)


def _holds(name: str, piece: str) -> bool:
    return f".{piece}." in f".{name}."


def _replaced(name: str, old: str, new: str) -> str:
    return f".{name}.".replace(f".{old}.", f".{new}.")[1:-1]
