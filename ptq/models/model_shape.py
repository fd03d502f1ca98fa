"""The sizes of a model, read from its config.json."""

from dataclasses import dataclass
from typing import Any

from ptq.errors import InputError, refused
from ptq.models.state import StateLayout

# Keys under which configs of different families say the same.
UNREAD = ("num_nextn_predict_layers", "num_mtp_layers")
"""Number of blocks for multi-token prediction."""
EXPERTS = ("num_experts", "num_local_experts")
"""Number of experts in a block."""
NUMBERS_OF_EXPERTS = "layers_num_experts"
"""Number of experts in every block, where a config computes it; 1: the block has an MLP and no experts."""
CHOSEN = ("num_experts_per_tok", "top_k_experts")
"""Number of experts that a token passes."""
DENSE = ("first_k_dense_replace", "num_dense_layers")
"""Number of blocks without experts, the first ones."""
BLOCKS_WITH_EXPERTS = "moe_layers"
"""Indices of the blocks that have experts."""
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
"""Number of experts that every token passes, as one MLP."""
SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)
"""Width of the MLP that every token passes, where it is no multiple of an expert's."""
WIDTH = (
    "shared_intermediate_size",
    "prefix_dense_intermediate_size",
    "intermediate_size_mlp",
    "intermediate_size",
    "ffn_dim",
    "n_inner",
)
"""Width of the MLP of blocks without experts; of Granite 4, of the one that every token passes."""
SHARED_KEYS, LAYER_INPUT = "num_kv_shared_layers", "hidden_size_per_layer_input"
LATENT = "moe_latent_size"
MLP_ALONE, EXPERTS_ALONE = "mlp", "moe"
"""Kinds of blocks that do not mix tokens."""
OF_NEMOTRON_H = "mtp_layers_block_type"
"""Its configs alone have this key; its blocks are one thing alone, even where none of them is an MLP."""
LARGEST = 2**31 - 1
"""Of any size: what is searched for the divisors of an absurd one would not end."""
CHUNKS = ("mamba_chunk_size", "chunk_size")
LARGEST_CHUNK = 4096
"""Tokens that a state space takes at once, 256 in practice: memory grows with the square of it."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that a plan needs, read from config.json."""

    hidden: int
    intermediate: int
    vocab: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    """Channels of a head that RoPE turns, the first ones."""
    tied: bool
    experts: int = 0
    """Experts in a block that has any; 0: the model has none."""
    experts_per_token: int = 0
    expert_width: int = 0
    """Width of one expert, as `intermediate` is that of an MLP."""
    shared_width: int = 0
    """Width of the MLP beside the experts, which every token passes."""
    latent: int = 0
    """Channels on which experts work, between two linears (`ptq.models.family.ExpertNames`); 0: the hidden states."""
    dense: frozenset[int] = frozenset()
    """Blocks without experts, in a model that has some."""
    halves: tuple[bool, ...] = ()
    """For every block whether it mixes tokens, and has no MLP, or the other way round; empty: each block does both."""
    without_keys: int = 0
    """Number of blocks, the last ones, that take keys and values over from earlier blocks."""
    wider: int = 1
    """Width of the MLP of the blocks `without_keys`, as a multiple of `intermediate`."""
    layer_input: int = 0
    """Channels of the input that every block has of its own (`ptq.models.family.LayerInputs`); 0: blocks have none."""
    layer_vocab: int = 0
    """Rows of the table from which `layer_input` is read."""
    state: int = 0
    """Channels of what travels between two blocks (`ptq.models.state`)."""
    unread: int = 0
    """Blocks behind the last one that a checkpoint may hold and a run leaves out: multi-token prediction."""

    def has_experts(self, index: int) -> bool:
        """Whether a block has experts in the place of one MLP."""
        return self.experts > 0 and index not in self.dense

    def has_mixer(self, index: int) -> bool:
        """Whether a block mixes tokens, by attention or otherwise."""
        return not self.halves or self.halves[index]

    def has_mlp(self, index: int) -> bool:
        """Whether a block has an MLP, or experts."""
        return not self.halves or not self.halves[index]

    def has_plain_mlp(self, index: int) -> bool:
        """Whether a block has one MLP, and no experts in its place."""
        return self.has_mlp(index) and not self.has_experts(index)

    def has_keys(self, index: int) -> bool:
        """Whether a block makes keys and values of its own."""
        return index < self.blocks - self.without_keys

    def width(self, index: int) -> int:
        """The width of a block's MLP."""
        return self.intermediate * (1 if self.has_keys(index) else self.wider)


@refused("config.json: its sizes make no sense")
def shape_of(config: Any) -> ModelShape:
    """Sizes of a model from its transformers config: where blocks differ in the sizes of their attention, those of the
    first. Raises InputError where they make no sense together."""
    layout, blocks = StateLayout.of(config), _size(config, "num_hidden_layers")
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[0]
    heads = _size(config, "num_attention_heads")
    kv_heads = heads if getattr(config, "num_key_value_heads", None) is None else _size(config, "num_key_value_heads")
    hidden = _size(config, "hidden_size")
    if getattr(config, "head_dim", None) is not None:
        head_dim = _size(config, "head_dim")
    elif hidden % heads == 0:
        head_dim = hidden // heads
    else:
        raise InputError(f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    if heads % kv_heads:
        raise InputError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    _check_settings(config, blocks)
    layer_input = _size(config, LAYER_INPUT) if getattr(config, LAYER_INPUT, None) else 0
    experts, without = _experts(config), hasattr(config, "intermediate_size")  # blocks without experts may be none
    return ModelShape(
        hidden=hidden,
        intermediate=_intermediate(config) if without or not experts else experts["expert_width"],
        vocab=_size(config, "vocab_size"),
        blocks=blocks,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=_rotary(config, head_dim),
        tied=bool(config.tie_word_embeddings),
        without_keys=getattr(config, SHARED_KEYS, None) or 0,
        wider=2 if getattr(config, "use_double_wide_mlp", False) else 1,
        layer_input=layer_input,
        layer_vocab=_size(config, "vocab_size_per_layer_input") if layer_input else 0,
        state=layout.width,
        unread=next((_size(config, key) for key in UNREAD if getattr(config, key, None)), 0),
        halves=_halves(config),
        **experts,
    )


def _check_settings(config: Any, blocks: int) -> None:
    """Raise InputError for settings that no family is supported with, and for some that make no sense."""
    if getattr(config, "clip_qkv", None) is not None:
        raise InputError(f"config.json: clip_qkv {config.clip_qkv}: models that clip their values are not supported")
    if isinstance(limit := getattr(config, "max_position_embeddings", None), int) and limit < 0:
        raise InputError(f"config.json: max_position_embeddings must be a positive whole number, found {limit}")
    if not getattr(config, "do_layer_norm_before", True):
        raise InputError("config.json: do_layer_norm_before false: norms behind attention and MLP are not supported")
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        raise InputError(
            f"config.json: word_embed_proj_dim {config.word_embed_proj_dim}, hidden_size {config.hidden_size}: an "
            "embedding of another width is not supported"
        )
    if not getattr(config, "use_post_norm", True):
        raise InputError("config.json: use_post_norm false: the family is supported with its post-norms alone")
    for key in CHUNKS:
        if getattr(config, key, None) is not None and (chunk := _size(config, key)) > LARGEST_CHUNK:
            raise InputError(f"config.json: {key} must be {LARGEST_CHUNK} at most, found {chunk}")
    if getattr(config, "qk_layernorm", False):
        raise InputError("config.json: qk_layernorm true: the family is supported without norms of queries and keys")
    if not getattr(config, "use_expert_bias", True):
        raise InputError("config.json: use_expert_bias false: the family is supported with these biases alone")
    if "shared" in (getattr(config, "indexer_types", None) or ()):
        raise InputError(
            "config.json: indexer_types: blocks that take over the tokens of an earlier one's indexer are not supported"
        )
    thetas = getattr(config, "layer_rope_theta", None)
    if thetas is not None and len(thetas) != blocks:
        raise InputError(f"config.json: layer_rope_theta lists {len(thetas)} blocks, num_hidden_layers says {blocks}")
    if getattr(config, SHARED_KEYS, None) and (shared := _size(config, SHARED_KEYS)) >= blocks:
        raise InputError(f"config.json: {SHARED_KEYS} {shared}, but there are only {blocks} blocks")


def _intermediate(config: Any) -> int:
    """The width of an MLP; LFM 2 may make another one of what the config says."""
    said = next((name for name in WIDTH if getattr(config, name, None)), None)
    if said is None and getattr(config, "n_inner", 0) is None:  # GPT-2
        return 4 * _size(config, "hidden_size")
    width = _size(config, said or "intermediate_size")
    if getattr(config, "block_auto_adjust_ff_dim", False):
        width = 2 * width // 3
        if (multiplier := config.block_ffn_dim_multiplier) is not None:
            multiple = _size(config, "block_multiple_of")
            width = -(-int(multiplier * width) // multiple) * multiple
        if not 1 <= width <= LARGEST:
            raise InputError(f"config.json: block_ffn_dim_multiplier {multiplier!r} makes MLPs of width {width}")
    return width


def _rotary(config: Any, head_dim: int) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("partial_rotary_factor", 1.0)
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise InputError(f"config.json: partial_rotary_factor must be above 0 and at most 1, found {factor!r}")
    rotary = int(head_dim * factor)
    return rotary + rotary % 2  # transformers has an angle for every two channels or what is left of them


def _experts(config: Any) -> dict[str, Any]:
    """The sizes of a mixture of experts; nothing where the config speaks of none."""
    count = next((name for name in EXPERTS if getattr(config, name, None)), None)
    blocks, width = _size(config, "num_hidden_layers"), "moe_intermediate_size"
    if count is None or not getattr(config, "enable_moe_block", True):
        return {}
    lists_blocks = any(getattr(config, name, None) is not None for name in (NUMBERS_OF_EXPERTS, BLOCKS_WITH_EXPERTS))
    if (lists_blocks or _halves(config)) and not any(has_experts(config, index) for index in range(blocks)):
        return {}
    per_token = next((name for name in CHOSEN if hasattr(config, name)), CHOSEN[0])
    experts, chosen = _size(config, count), _size(config, per_token)
    if chosen > experts:
        raise InputError(f"config.json: {per_token} {chosen}, but there are only {experts} experts")
    groups, chosen_groups = (getattr(config, key, None) or 1 for key in ("n_group", "topk_group"))
    if experts % groups or chosen_groups > groups or (groups > 1 and experts // groups < 2):
        raise InputError(
            f"config.json: n_group {groups} and topk_group {chosen_groups} do not fit {experts} experts: a router "
            "chooses groups of equal size, of two experts at least"
        )
    found = {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_width": _size(config, width if getattr(config, width, None) is not None else "intermediate_size"),
        "latent": _size(config, LATENT) if getattr(config, LATENT, None) is not None else 0,
        "dense": frozenset(index for index in range(blocks) if not has_experts(config, index)),
    }
    if hasattr(config, "enable_moe_block"):  # the MLP that blocks have without experts, too
        found["shared_width"] = _size(config, "intermediate_size")
    elif (shared := next((name for name in SHARED_WIDTH if hasattr(config, name)), None)) is not None:
        found["shared_width"] = _size(config, shared) if getattr(config, shared) else 0
    elif (shared := next((name for name in SHARED if hasattr(config, name)), None)) is not None:
        found["shared_width"] = found["expert_width"] * _size(config, shared) if getattr(config, shared) else 0
    elif hasattr(config, "moe_topk") or hasattr(config, BLOCKS_WITH_EXPERTS):  # Hunyuan, Llama 4
        found["shared_width"] = _size(config, "intermediate_size")
    return found


def _halves(config: Any) -> tuple[bool, ...]:
    """`ModelShape.halves` of a config: one whose `layer_types` has MLPs among what mixes tokens, or could."""
    kinds = getattr(config, "layer_types", None) or ()
    alone = {MLP_ALONE, EXPERTS_ALONE}
    return tuple(kind not in alone for kind in kinds) if alone & {*kinds} or hasattr(config, OF_NEMOTRON_H) else ()


def has_experts(config: Any, index: int) -> bool:
    """Whether a config with experts puts them into block `index`: it may list blocks with or without, say how many of
    the first ones have none, or every how many blocks have them."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is not None:
        return kinds[index] == "sparse"
    if (numbers := getattr(config, NUMBERS_OF_EXPERTS, None)) is not None:
        return numbers[index] > 1
    if (listed := getattr(config, BLOCKS_WITH_EXPERTS, None)) is not None:
        return index in listed
    if _halves(config):
        return config.layer_types[index] == EXPERTS_ALONE
    if index < max(getattr(config, name, None) or 0 for name in DENSE):
        return False
    if hasattr(config, "moe_layer_start_index") and not (
        config.moe_layer_start_index <= index <= config.moe_layer_end_index
    ):
        return False
    step = next(
        (_size(config, key) for key in ("decoder_sparse_step", "moe_layer_interval") if hasattr(config, key)), 1
    )
    return index not in (getattr(config, "mlp_only_layers", None) or ()) and (index + 1) % step == 0


def _size(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    if isinstance(value, list) and value and all(each == value[0] for each in value):  # one for every block
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: {key} must be a positive whole number, found {value!r}")
    if value > LARGEST:
        raise InputError(f"config.json: {key} must be {LARGEST} at most, found {value}")
    return value
