"""Perplexity and agreement against a naive float64 loop, and the command line's errors."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ptq.commands.evaluate import CHUNK, compare, perplexity
from ptq.commands.windows import Windows, context_for, windows_from_text
from ptq.errors import InputError, RunError

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


def tiny_llama(seed: int, vocabulary: int = 50) -> LlamaForCausalLM:
    """Random weights with logits far from uniform, so that a wrong target or window changes the loss."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=320,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def windows_of(ids: torch.Tensor) -> Windows:
    return Windows(ids, ids.numel(), "none", "none")


def random_windows(count: int, context: int, seed: int = 0) -> Windows:
    generator = torch.Generator().manual_seed(seed)
    return windows_of(torch.randint(50, (count, context), generator=generator))


def naive_log_probabilities(model: LlamaForCausalLM, row: list[int]) -> list[list[float]]:
    """log p(token | prefix) for every predicted position: one prefix per forward, softmax by hand in float64."""
    out = []
    for end in range(1, len(row)):
        with torch.no_grad():
            logits = model(torch.tensor([row[:end]])).logits[0, -1].double().tolist()
        top = max(logits)
        total = top + math.log(sum(math.exp(value - top) for value in logits))
        out.append([value - total for value in logits])
    return out


def naive_losses(model: LlamaForCausalLM, row: list[int]) -> list[float]:
    return [-scores[target] for scores, target in zip(naive_log_probabilities(model, row), row[1:], strict=True)]


def test_perplexity_and_its_standard_error_equal_the_naive_loop():
    model, windows = tiny_llama(0).double(), random_windows(3, 12)
    losses = [naive_losses(model, row) for row in windows.tokens.tolist()]
    means = [sum(row) / len(row) for row in losses]
    mean = sum(sum(row) for row in losses) / sum(len(row) for row in losses)
    error = math.sqrt(sum((value - mean) ** 2 for value in means) / 2 / 3)

    measured = perplexity(model, windows)

    assert measured.loss == pytest.approx(mean, rel=1e-9)
    assert measured.perplexity == pytest.approx(math.exp(mean), rel=1e-9)
    assert measured.loss_standard_error == pytest.approx(error, rel=1e-9)
    assert measured.standard_error == pytest.approx(math.exp(mean) * error, rel=1e-9)
    assert (measured.windows, measured.context, measured.tokens) == (3, 12, 33)


def test_windows_longer_than_a_chunk_lose_no_position():
    model, windows = tiny_llama(1), random_windows(1, CHUNK + 40)
    with torch.no_grad():
        scores = model(windows.tokens).logits[0, :-1].double().log_softmax(-1)
    expected = -scores[torch.arange(CHUNK + 39), windows.tokens[0, 1:]].mean().item()

    measured = perplexity(model, windows)

    assert measured.loss == pytest.approx(expected, rel=1e-6)
    assert measured.loss_standard_error is None and measured.standard_error is None


def test_uniform_model_has_perplexity_of_the_vocabulary():
    model = tiny_llama(0)
    torch.nn.init.zeros_(model.lm_head.weight)
    measured = perplexity(model, random_windows(2, 10))
    assert measured.perplexity == pytest.approx(50, rel=1e-6)
    assert measured.standard_error == pytest.approx(0, abs=1e-5)


def test_bfloat16_logits_are_summed_in_float32():
    model, windows = tiny_llama(2).bfloat16(), random_windows(2, 20)
    with torch.no_grad():
        scores = model(windows.tokens).logits[:, :-1].double().log_softmax(-1)
    expected = -scores.gather(2, windows.tokens[:, 1:, None]).mean().item()
    assert perplexity(model, windows).loss == pytest.approx(expected, rel=1e-5)


def test_dropout_is_off_while_measuring_and_the_mode_is_restored():
    model, windows = tiny_llama(0), random_windows(2, 10)
    expected = perplexity(model, windows)
    model.config.attention_dropout = 0.9
    for layer in model.model.layers:
        vars(layer.self_attn)["attention_dropout"] = 0.9
    model.train()
    assert perplexity(model, windows) == expected
    assert model.training


def test_progress_counts_windows():
    seen = []
    perplexity(tiny_llama(0), random_windows(3, 5), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_model_agrees_with_itself():
    model, windows = tiny_llama(0), random_windows(3, 12)
    agreement = compare(model, model, windows)
    assert agreement.kl == 0
    assert agreement.top1 == 1
    assert agreement.loss_increase == 0
    assert agreement.model == agreement.original == perplexity(model, windows)


def test_kl_and_top1_equal_the_hand_computed():
    model, original, windows = tiny_llama(3).double(), tiny_llama(4).double(), random_windows(3, 8)
    divergences, same, increases = [], [], []
    for row in windows.tokens.tolist():
        pairs = list(zip(naive_log_probabilities(model, row), naive_log_probabilities(original, row), strict=True))
        terms = [sum(math.exp(p) * (p - q) for q, p in zip(log_q, log_p, strict=True)) for log_q, log_p in pairs]
        divergences.append(sum(terms) / len(terms))
        same += [log_q.index(max(log_q)) == log_p.index(max(log_p)) for log_q, log_p in pairs]
        increases.append((sum(naive_losses(model, row)) - sum(naive_losses(original, row))) / 7)
    mean = sum(divergences) / 3

    agreement = compare(model, original, windows)

    assert agreement.kl == pytest.approx(mean, rel=1e-9)
    assert agreement.kl_standard_error == pytest.approx(math.sqrt(sum((d - mean) ** 2 for d in divergences) / 6))
    assert agreement.top1 == pytest.approx(sum(same) / len(same))
    increase = sum(increases) / 3
    assert agreement.loss_increase == pytest.approx(increase, rel=1e-9)
    paired_error = math.sqrt(sum((each - increase) ** 2 for each in increases) / 6)
    assert agreement.loss_increase_standard_error == pytest.approx(paired_error)
    assert agreement.model == perplexity(model, windows)
    assert agreement.original == perplexity(original, windows)


def test_forbidden_tokens_of_both_models_add_nothing_to_kl():
    model, original, windows = tiny_llama(0), tiny_llama(1), random_windows(2, 6)
    windows.tokens.clamp_(min=1)
    forbid = torch.zeros(50).index_fill(0, torch.tensor([0]), -torch.inf)
    for each in (model, original):
        each.lm_head.register_forward_hook(lambda *call: call[-1] + forbid)
    assert math.isfinite(compare(model, original, windows).kl)


def test_text_is_tokenised_once_and_its_tail_dropped(byte_tokenizer):
    windows = windows_from_text(byte_tokenizer, "abcdefghij", 4)
    # <s> a b c | d e f g, and the tail h i j is gone
    assert windows.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (windows.found, len(windows), windows.context) == (11, 2, 4)
    assert windows.bos == "one at the start of the text, none per window"


def test_text_without_special_tokens_says_so(byte_tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer.backend_tokenizer, bos_token="<s>")
    bare.backend_tokenizer.post_processor = None  # type: ignore[assignment]
    assert windows_from_text(bare, "abcd", 2).bos == "none"


def test_a_family_that_needs_it_has_a_beginning_in_every_window(byte_tokenizer):
    windows = windows_from_text(byte_tokenizer, "abcdefghij", 4, bos=0)
    assert windows.tokens.tolist() == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 7, 8, 9]]
    assert (windows.found, windows.bos) == (10, "one in front of every window")


def test_short_text_is_refused_with_the_count(byte_tokenizer):
    with pytest.raises(InputError, match="has 4 tokens, too few for one window of 5"):
        windows_from_text(byte_tokenizer, "abc", 5)


@pytest.mark.parametrize(("longest", "requested", "expected"), [(320, None, 320), (4096, None, 2048), (320, 100, 100)])
def test_default_context(longest, requested, expected):
    assert context_for(LlamaConfig(max_position_embeddings=longest), requested) == expected


@pytest.mark.parametrize(("requested", "message"), [(321, "max_position_embeddings 320"), (1, "at least 2 tokens")])
def test_bad_context_is_refused(requested, message):
    with pytest.raises(InputError, match=message):
        context_for(LlamaConfig(max_position_embeddings=320), requested)


def test_windows_that_do_not_fit_the_model_are_refused():
    model = tiny_llama(0)
    with pytest.raises(InputError, match="longer than the model reaches"):
        perplexity(model, windows_of(torch.zeros(1, 321, dtype=torch.long)))
    with pytest.raises(InputError, match="token 50"):
        perplexity(model, windows_of(torch.full((1, 4), 50)))
    with pytest.raises(InputError, match="vocabulary: 50 logits against 60"):
        compare(model, tiny_llama(0, vocabulary=60), random_windows(1, 4))


def test_broken_model_is_an_error_not_a_number():
    model = tiny_llama(0)
    torch.nn.init.constant_(model.model.norm.weight, math.nan)
    with pytest.raises(RunError, match="window 0"):
        perplexity(model, random_windows(2, 5))


@pytest.mark.skipif(
    not SHARED.is_dir(), reason="needs the trained models of ../shared, which are not part of the project"
)
def test_trained_model_predicts_the_text_it_was_trained_for():
    folder = SHARED / "models" / "stories260k"
    text = (SHARED / "data" / "tinystories" / "tinystories_train_sample.txt").read_text()[:4000]
    model = AutoModelForCausalLM.from_pretrained(folder)
    windows = windows_from_text(AutoTokenizer.from_pretrained(folder), text, context_for(model.config, 256))
    assert perplexity(model, windows).perplexity < 10
