"""The settings of the packed KV cache, and which models can have one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import check_refused, quantize
from test_kv_cache import FOUR, MIXED, SETTINGS, model_of
from tiny_models import CACHED, DISTINCT, save_model

from ptq.errors import InputError
from ptq.kv.attention import attach
from ptq.kv.kv_cache import CacheQuantization
from ptq.models.families import FAMILIES


def test_settings_round_trip() -> None:
    for settings in SETTINGS.values():
        assert CacheQuantization.parse(settings.as_dict()) == settings
    assert FOUR.as_dict() == {
        "version": 2, "key_bits": 4, "value_bits": 4, "key_clip": 0.95, "value_clip": 0.95, "sinks": 0,
        "hadamard": "paley1:19", "centered": False,
    }  # fmt: skip


def test_settings_of_version_1_are_read() -> None:
    """As checkpoints of before have them: one clip, and keys as they are."""
    entry = {"version": 1, "key_bits": 3, "value_bits": 8, "clip": 0.9, "sinks": 3, "hadamard": "paley1:19"}
    assert CacheQuantization.parse(entry) == replace(MIXED, value_clip=0.9, centered=False)
    for wrong in ({**entry, "centered": True}, {**entry, "key_clip": 0.8}):
        with pytest.raises(InputError, match="expected key_bits, value_bits, clip, sinks, hadamard; found"):
            CacheQuantization.parse(wrong)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"key_bits": 5}, "key_bits must be one of 2, 3, 4, 6, 8, 16, found 5"),
        ({"value_bits": True}, "value_bits must be a whole number, found True"),
        ({"key_clip": 0}, "key_clip must be above 0"),
        ({"value_clip": 1.5}, "value_clip"),
        ({"value_clip": float("nan")}, "value_clip"),
        ({"key_clip": 10**400}, "kv_cache: int too large"),
        ({"centered": 1}, "centered must be true or false, found 1"),
        ({"centered": True, "key_bits": 16}, "keys of 16 bits are cached as they are"),
        ({"sinks": -1}, "sinks must be"),
        ({"sinks": 1000}, "sinks must be"),
        ({"hadamard": "walsh:4"}, "Hadamard construction"),
        ({"hadamard": 4}, "hadamard must be a text, or null, found 4"),
        ({"version": 3}, "this package reads versions 1 to 2"),
        ({"version": True}, "this package reads versions 1 to 2"),
        ({"more": 1}, "expected key_bits"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CacheQuantization.parse({**FOUR.as_dict(), **changes})
    with pytest.raises(InputError, match="expected an object"):
        CacheQuantization.parse([4])


def test_settings_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(InputError, match="does not divide head_dim 20"):
        attach(model_of(None), CacheQuantization(hadamard="sylvester:3"))
    with pytest.raises(InputError, match="sliding-window"):
        attach(model_of(None, "mistral", sliding_window=8), CacheQuantization(sinks=4))
    with pytest.raises(InputError, match="caps the logits"):
        attach(model_of(None, "gemma3_text", attn_logit_softcapping=50.0), FOUR)
    with pytest.raises(InputError, match="use_bidirectional_attention True in config.json"):
        attach(model_of(None, "gemma2", attn_logit_softcapping=None, use_bidirectional_attention=True), FOUR)
    with pytest.raises(InputError, match="is_causal False in config.json"):
        attach(model_of(None, is_causal=False), FOUR)


@pytest.mark.parametrize("model_type", [name for name in DISTINCT if name not in CACHED])
def test_what_does_not_fit_is_refused_before_anything_is_done(model_type: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", model_type)
    message = "sinks of its own" if "sinks" in str(FAMILIES[model_type].kept) else "caps the logits"
    message = f"not all blocks of {model_type} have plain attention" if FAMILIES[model_type].mixers else message
    for bits in ("--kv-bits", "--value-bits"):
        check_refused(quantize("quarot", model, tmp_path / "out", bits, 4, "--plan"), message)
    assert quantize("quarot", model, tmp_path / "out", "--activation-bits", 4, "--plan").exit_code == 0
