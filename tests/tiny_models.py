"""Tiny random models of every family, and what is special about each: the settings of their configs, and lists of
families for tests that run over some of them."""

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from ptq.hf import experts, fused
from ptq.models.families import FAMILIES
from ptq.models.family import ExpertNames

ODD = dict(
    hidden_size=72, intermediate_size=152, num_attention_heads=4, num_key_value_heads=2, head_dim=20,
    num_hidden_layers=2, vocab_size=96, max_position_embeddings=128, tie_word_embeddings=True,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
"""Widths that are no powers of two, head_dim different from hidden / heads, grouped queries, tied embeddings."""


TINY: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, head_dim=8, num_attention_heads=2, num_key_value_heads=1
)
"""For tests that run the whole job many times."""


SWITCHES: dict[str, Any] = dict(
    attention_bias=True, attention_out_bias=True, use_qk_norm=True, mlp_bias=True, use_bias=True,
    embedding_multiplier=7.3, residual_multiplier=0.31, attention_multiplier=0.09, logits_scaling=5.7,
)  # fmt: skip
"""Set where the family's config has them: every bias, and multipliers far from 1, their default."""

SPARSE: dict[str, Any] = dict(
    num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=40,
    mlp_only_layers=[0], mlp_layer_types=["dense", "sparse"], first_k_dense_replace=1, num_dense_layers=1,
    norm_topk_prob=True, n_group=2, topk_group=1, moe_num_shared_experts=2,
    routed_scaling_factor=1.7, n_shared_experts=2, shared_expert_intermediate_size=56,
)  # fmt: skip
"""Likewise: few experts, of another width than the one block that has none."""
MIXED: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=20,
    q_lora_rank=32, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=20,
    index_topk=128, index_n_heads=2, index_head_dim=16,
    mamba_n_heads=4, mamba_d_state=16, mamba_n_groups=2, mamba_expand=2, mamba_chunk_size=16,
)  # fmt: skip
"""Likewise: sizes of what mixes tokens in the place of plain attention."""
LATENT: dict[str, Any] = dict(head_dim=8, num_key_value_heads=4)  # of RoPE; every head has keys of its own
TWO_MIXERS: dict[str, Any] = dict(layer_types=["linear_attention", "full_attention"])
TWO_WINDOWS: dict[str, Any] = dict(layer_types=["full_attention", "sliding_attention"], sliding_window=16)
SCALED_QUERIES: dict[str, Any] = dict(
    rope_parameters=dict(
        rope_type="yarn", rope_theta=500.0, factor=8.0, original_max_position_embeddings=16, beta_fast=32.0,
        beta_slow=1.0, mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.5,
    )
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "sarvam_mla"), LATENT
    ),
    "minicpm3": dict(LATENT, scale_emb=0.7, dim_model_base=36),  # with 12 and 256 every token expects itself, surely
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), TWO_MIXERS),
    "youtu": dict(LATENT, pad_token_id=None),  # transformers makes that row of the embedding zeros when it loads
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"), dict(layer_types=["conv", "full_attention"], hidden_size=80, block_multiple_of=8)
    ),
    "bamba": dict(attn_layer_indices=[1], hidden_size=80),
    "jamba": dict(
        hidden_size=80, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        mamba_dt_rank=12,
    ),
    "falcon_h1": dict(
        mamba_d_ssm=None, mamba_rms_norm=True, projectors_bias=True, mamba_proj_bias=True, lm_head_multiplier=0.4,
        key_multiplier=0.6, mlp_multipliers=[0.8, 0.5], ssm_multipliers=[0.7, 1.3, 0.6, 0.9, 1.1],
        ssm_in_multiplier=1.2, ssm_out_multiplier=0.7, attention_in_multiplier=0.9, attention_out_multiplier=1.4,
    ),
    "nemotron_h": dict(
        num_hidden_layers=5, tie_word_embeddings=False,
        layer_types=["linear_attention", "moe", "full_attention", "mlp", "moe"], moe_latent_size=40, n_routed_experts=4,
        moe_shared_expert_intermediate_size=56, mamba_num_heads=4, mamba_head_dim=36, ssm_state_size=16, n_groups=2,
        chunk_size=16,
    ),
    "granitemoehybrid": dict(
        layer_types=["linear_attention", "full_attention"], num_local_experts=0, shared_intermediate_size=152,
        hidden_size=80,
    ),
    **dict.fromkeys(  # heads fill hidden_size
        ("olmoe", "helium", "qwen2_moe", "flex_olmo", "stablelm", "gpt_neox"), dict(hidden_size=80)
    ),
    "opt": dict(hidden_size=80, ffn_dim=152),
    "gpt2": dict(hidden_size=80, n_inner=152),
    "nanochat": dict(final_logit_softcapping=5.0),
    **dict.fromkeys(("gemma2", "vaultgemma"), dict(attn_logit_softcapping=0.6, final_logit_softcapping=5.0)),
    "gemma4_text": dict(
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=16,
        num_kv_shared_layers=2, use_double_wide_mlp=True, attention_k_eq_v=True, global_head_dim=36,
        num_global_key_value_heads=1, hidden_size_per_layer_input=16, vocab_size_per_layer_input=96,
        final_logit_softcapping=5.0, enable_moe_block=False, top_k_experts=2,
    ),
    "gemma4_unified_text": dict(
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=16,
        num_kv_shared_layers=2, use_double_wide_mlp=True, attention_k_eq_v=True, global_head_dim=36,
        num_global_key_value_heads=1, final_logit_softcapping=5.0,
    ),
    "cohere2_moe": dict(
        TWO_WINDOWS, num_shared_experts=2, expert_selection_fn="sigmoid", prefix_dense_intermediate_size=136,
    ),
    "cohere_compass_text": dict(
        TWO_WINDOWS, logit_scale=0.3,
        rope_parameters=dict(
            full_attention=None,
            sliding_attention=dict(rope_type="default", rope_theta=500.0, mrope_section=[4, 3, 3]),
        ),
    ),
    "minimax": dict(
        layer_types=["full_attention", "linear_attention"], linear_attn_alpha_factor=0.7, full_attn_alpha_factor=0.9,
        mlp_beta_factor=1.3, block_size=16,
    ),
    "exaone_moe": dict(sliding_window_pattern=2, sliding_window=16),
    "hy_v3": dict(router_scaling_factor=1.7),
    "phimoe": dict(lm_head_bias=True),
    "laguna": dict(
        TWO_WINDOWS, num_attention_heads_per_layer=[4, 6], moe_routed_scaling_factor=1.7,
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5),
            sliding_attention=dict(rope_type="default", rope_theta=100.0),
        ),
    ),
    "lfm3": dict(layer_types=["conv", "full_attention"], hidden_size=80),
    "mimo_v2_flash": dict(
        TWO_WINDOWS, num_key_value_heads=1, v_head_dim=12, n_routed_experts=4,
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5),
            sliding_attention=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
        ),
    ),
    "flint": TWO_WINDOWS,
    "kolibri1": dict(layer_types=["sliding_attention", "full_attention"], sliding_window=16),
    "exaone4": dict(sliding_window_pattern=2),  # the second block has no RoPE
    "granite_swa": dict(layer_rope_theta=[500.0, 0]),
    "granitemoe_swa": dict(TWO_WINDOWS, layer_rope_theta=[500.0, 0], shared_intermediate_size=0),
    "granitemoeshared": dict(shared_intermediate_size=136),
    "llama4_text": dict(
        intermediate_size_mlp=136, interleave_moe_layer_step=2, no_rope_layer_interval=2, floor_scale=4, attn_scale=0.7,
    ),
    "gpt_oss": dict(
        sliding_window=16, swiglu_limit=0.7, layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(
            rope_type="yarn", rope_theta=500.0, factor=8.0, original_max_position_embeddings=16, beta_fast=32.0,
            beta_slow=1.0, truncate=False,
        ),
    ),
    "ministral3": SCALED_QUERIES,
    "axk2": dict(LATENT, mlp_layer_types=["dense", "sparse"], gated_norm_rank=12),
    "axk1": dict(LATENT, mlp_layer_types=["dense", "sparse"]),
    "bailing_hybrid": dict(
        TWO_MIXERS, num_key_value_heads=4, head_dim=8, mlp_layer_types=["dense", "sparse"], tie_word_embeddings=False,
    ),
    "olmo_hybrid": TWO_MIXERS,
    "kimi_linear": dict(
        TWO_MIXERS, num_key_value_heads=4, num_experts=4, linear_head_dim=24, linear_num_heads=4, head_dim=8,
        mlp_layer_types=["dense", "sparse"], tie_word_embeddings=False,
    ),
    "mistral4": dict(
        LATENT, head_dim=20, rope_parameters=SCALED_QUERIES["rope_parameters"] | {"partial_rotary_factor": 0.4},
    ),
}  # fmt: skip
"""What single families need, and settings of their own that would otherwise do nothing."""


PARTIAL = dict(partial_rotary_factor=0.5)
"""Where the family can turn less than whole heads."""


ALIKE = {
    "dots1", "sarvam_moe", "solar_open", "mellum", "flex_olmo", "hunyuan_v1_moe", "lfm2_moe", "glm_moe_dsa", "afmoe",
    "ernie4_5_moe",
    "exaone", "arcee", "jais2", "starcoder2", "stablelm", "cohere2",
    "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v32", "diffllama", "glm4_moe_lite", "kimi_linear",
    "mistral4", "olmo_hybrid", "sarvam_mla", "youtu", "minicpm3", "qwen3_5_moe_text",
    "ministral3", "seed_oss", "internlm3", "iquestcoder", "cwm", "helium", "hyperclovax", "exaone4", "vaultgemma",
    "nemotron_h", "falcon_h1", "jamba", "flint", "kolibri1",
    "gemma4_unified_text", "cohere2_moe", "cohere_compass_text", "minimax", "exaone_moe", "hy_v3", "phimoe",
    "granitemoe", "granitemoeshared", "granitemoe_swa", "laguna", "lfm3", "mimo_v2_flash",
}  # fmt: skip
"""Families of parts that others have too, where runs of every kind would say nothing new, so a few tests must do; and
some with tests of their own (test_halves.py, test_mixers.py)."""
UNTURNED = {"gemma4_text", "gpt_neox"}
"""Families into whose weights no rotation vanishes: they have neither R1 nor R2."""
NEVER_TIED = {"bailing_hybrid", "kimi_linear", "nemotron_h"}
"""Those whose head transformers never ties to the embedding."""
DISTINCT = [name for name in FAMILIES if name not in ALIKE]
CACHED = [
    name for name in DISTINCT
    if FAMILIES[name].plain_attention and not FAMILIES[name].mixers
    and "attn_logit_softcapping" not in OWN.get(name, {})
]  # fmt: skip
"""Those whose KV cache can be packed."""
PLAIN_ATTENTION = [name for name, family in FAMILIES.items() if not family.mixers]
"""Those all of whose blocks have plain attention."""
LATENT_ATTENTION = (
    "minicpm3", "youtu", "deepseek_v3", "glm4_moe_lite", "sarvam_mla", "deepseek_v2", "kimi_linear", "axk1",
    "mistral4",
)  # fmt: skip
"""Those that decode by `ptq::latent_attention`."""
WITHOUT_EXPERTS = {"gemma4_text", "granitemoehybrid"}
"""Those that have rows for experts, and tiny models without."""
SPARSE_FAMILIES = [name for name, family in FAMILIES.items() if family.experts and name not in WITHOUT_EXPERTS]
"""Those whose tiny models have experts."""
WEIGHTS_ON_INPUT = {"llama4_text"}
"""Those whose experts are given rows times the router's weights (`ptq.hf.experts.SortedExperts`)."""
WRITTEN_PLAIN = [
    name for name, family in FAMILIES.items()
    if not family.transposed and not (name in SPARSE_FAMILIES and family.experts and family.experts.fused)
]  # fmt: skip
"""Those of which transformers reads plain weights as a run writes them."""
KEYS_WITHOUT_NORM = [name for name in CACHED if FAMILIES[name].norm_tensors and not FAMILIES[name].norms_keys]


def varied(variants: Iterable[Any], families: Iterable[str] = FAMILIES) -> list[tuple[str, Any]]:
    """Families, each with all variants of a test; those in `ALIKE` with the last one alone."""
    all_of_them = list(variants)
    return [(name, one) for name in families for one in (all_of_them[-1:] if name in ALIKE else all_of_them)]


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A config with every bias and multiplier that the family can have."""
    defaults = CONFIG_MAPPING[model_type]()
    computed = {key for key, value in vars(type(defaults)).items() if isinstance(value, property)}
    settings = {key: value for key, value in (SWITCHES | SPARSE | MIXED).items() if key not in computed}
    switches = {key: value for key, value in settings.items() if hasattr(defaults, key)}
    if PARTIAL.keys() <= getattr(defaults, "rope_parameters", {}).keys():
        switches |= PARTIAL
    values = {**ODD, **switches, **OWN.get(model_type, {}), **changes}
    for key in {"layer_rope_theta", "layer_types"} & values.keys():  # one for each block
        values[key] = values[key][: values["num_hidden_layers"]]
    for key in ("num_key_value_heads", "intermediate_size"):  # OPT and GPT-2 have none, or another name for it
        if not hasattr(defaults, key):
            del values[key]
    if hasattr(defaults, "mamba_d_head"):
        values["mamba_d_head"] = values["mamba_expand"] * values["hidden_size"] // values["mamba_n_heads"]
    return CONFIG_MAPPING[model_type](**values)


def tiny_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A random model that hides nothing: embeddings with a mean, norm gains far from 1, biases far from 0."""
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    for name, parameter in (*model.named_parameters(), *buffers.items()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 0:  # a constant of an activation
            continue
        if ("norm" in name or ".ln_" in name) and not name.endswith("bias"):
            gain = 0.3 + 2.7 * torch.rand(parameter.shape, generator=generator)
            if "q_norm" in name and config.model_type == "gemma4_text":  # which does not scale the scores
                gain = gain / parameter.shape[0] ** 0.5
            parameter.data = gain.to(dtype)
        elif "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
            parameter.data = (0.5 * noise + 0.3).to(dtype)
        elif name.endswith("e_score_correction_bias"):
            exact = name.rpartition(".")[2] in (model._keep_in_fp32_modules_strict or ())
            parameter.data = (0.2 * noise).to(torch.float32 if exact else dtype)
        else:
            parameter.data = (noise * (0.5 if name.endswith("bias") else parameter.shape[-1] ** -0.5)).to(dtype)
    return model


@torch.no_grad()
def decode(model: Any, batch: int = 1, steps: int = 4, padded: bool = False) -> list[torch.Tensor]:
    """The logits of six tokens at once, then of some more, one by one. With `padded` the first tokens of all rows but
    the first are padding: one of the second row, two of the third, at most five."""
    seen = torch.arange(6 + steps) >= torch.arange(batch)[:, None].clamp(max=5)
    ids = torch.randint(model.config.vocab_size, (batch, 6), generator=torch.Generator().manual_seed(1))
    out = model(ids, use_cache=True, **({"attention_mask": seen[:, :6].long()} if padded else {}))
    logits = [out.logits]
    for i in range(steps):
        token = ids[:, i : i + 1]
        # Bamba, in transformers, counts the positions of every call from 0 on; `generate` gives them.
        given = {"position_ids": torch.full_like(token, 6 + i)} if model.config.model_type == "bamba" else {}
        given |= {"attention_mask": seen[:, : 7 + i].long()} if padded else {}
        out = model(token, past_key_values=out.past_key_values, use_cache=True, **given)
        logits.append(out.logits)
    return logits


def stored(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model as transformers writes them to files, without a tied head; with a matrix [n, k] for each
    linear, of an expert too."""
    tied = model.config.tie_word_embeddings
    state = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    family = FAMILIES[model.config.model_type]
    turned = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    state = {name: x.T if name in turned else x for name, x in revert_weight_conversion(model, state).items()}
    state = {family.file_name(name): x for name, x in state.items()}
    for whole, pieces in family.stacked:
        for prefix in [name.removesuffix(pieces[0]) for name in state if name.endswith(f".{pieces[0]}")]:
            state[prefix + whole] = torch.cat([state.pop(prefix + piece) for piece in pieces])
    if family.joined:
        config, linears = model.config, (family.query, family.key, family.value)
        rows = [heads * config.head_dim for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        for name in [name for name in state if f".{family.joined}." in name]:
            for linear, piece in zip(linears, state.pop(name).split(rows), strict=True):
                state[name.replace(family.joined, linear)] = piece
    return apart(state, family.experts)


def apart(tensors: Mapping[str, torch.Tensor], names: ExpertNames | None) -> dict[str, torch.Tensor]:
    """Tensors of a model, of fused experts those of the single ones."""
    found = {}
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        if names is None or not fused.is_fused_parameter(name):
            found[name] = tensor
            continue
        inside = fused.take_apart({leaf: tensor}, fused.FusedLayout.of(names), names.linears)
        found |= {f"{owner}.{part}": one for part, one in inside.items()}
    return found


def experts_of(model: Any) -> Any:
    """The experts of the second block."""
    family = FAMILIES[model.config.model_type]
    assert family.experts is not None
    return model.model.layers[1].get_submodule(family.module_name(family.experts.experts))


def separated(model: Any, names: tuple[str, str, str] | None) -> Any:
    """The same model with experts of linears of these names, where it has fused ones."""
    state = apart(model.state_dict(), FAMILIES[model.config.model_type].experts) if names else {}
    if experts.separate(model, names):
        model.load_state_dict(state, strict=True, assign=True)
    return model


def save_model(folder: Path, model_type: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A tiny model as a Hugging Face folder, with a tokenizer of one token per character."""
    tiny_model(tiny_config(model_type, **changes), dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def plain_gguf(model: Path, out: Path) -> Path:
    """The GGUF of a model, as scripts/plain_gguf.py writes it."""
    path = Path(__file__).resolve().parents[1] / "scripts" / "plain_gguf.py"
    spec = importlib.util.spec_from_file_location("plain_gguf", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(model, out)
    return out


def tokenizer() -> PreTrainedTokenizerFast:
    """Characters as tokens."""
    vocab = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *map(chr, range(32, 125))])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
