"""`quantize generate`: a model, plain or packed, continues a text or answers, word by word."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from ptq.errors import InputError, refused
from ptq.hf.loading import load_config, load_model, load_tokenizer, positions_of


@dataclass(frozen=True)
class Request:
    """What is to be written. `temperature` None leaves it to the model's generation_config.json, 0 takes the most
    likely token; `chat` None asks a model that chats, and lets any other go on."""

    prompt: str
    new_tokens: int
    temperature: float | None
    chat: bool | None
    seed: int


@dataclass(frozen=True)
class Written:
    """How long the prompt was and what came of it, in tokens and seconds; `at_limit`: nothing more fits the model."""

    prompt_tokens: int
    prompt_seconds: float
    new_tokens: int
    new_seconds: float
    at_limit: bool


def generate(
    model: str, request: Request, write: Callable[[str], None], device: torch.device, dtype: torch.dtype | None = None
) -> Written:
    """Load `model`, and `write` what it says, piece by piece. The global random state is left as it was.

    Raises InputError for a prompt without tokens, or with as many as the model has positions; for a chat without a
    template; and for whatever transformers refuses to generate with.
    """
    if not request.prompt:
        raise InputError("the prompt is empty; give some text to go on from")
    limit = positions_of(load_config(model))
    tokenizer = load_tokenizer(model)
    ids = _prompt(tokenizer, request)
    room = request.new_tokens if limit is None else limit - len(ids)
    if room < 1:
        raise InputError(f"the prompt has {len(ids)} tokens, and the model {limit} positions; give a shorter one")
    loaded: Any = load_model(model, dtype, device)
    # On the model, too: transformers fills what is None from there.
    loaded.generation_config = _settings(loaded.generation_config, request, min(room, request.new_tokens))
    streamer = _Observed(tokenizer, write)
    batch = torch.tensor([ids], device=loaded.device)
    gpus = [loaded.device] if loaded.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), refused(f"{model} could not generate"):
        torch.manual_seed(request.seed)
        loaded.generate(batch, attention_mask=torch.ones_like(batch), streamer=streamer, tokenizer=tokenizer)
    begun, read, *_ = times = streamer.times
    count = len(times) - 1
    at_limit = count == room < request.new_tokens and streamer.last not in _ends(loaded.generation_config)
    return Written(len(ids), read - begun, count, times[-1] - read, at_limit)


def _prompt(tokenizer: PreTrainedTokenizerBase, request: Request) -> list[int]:
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if request.chat and not has_template:
        raise InputError("--chat: the model's tokenizer has no chat template; without it the model continues the text")
    if request.chat is False or not has_template:
        ids = tokenizer(request.prompt, verbose=False)["input_ids"]
    else:
        ids = tokenizer(_turn(tokenizer, request.prompt), add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise InputError("the prompt has no tokens; give some text to go on from")
    return list(ids)


def _turn(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """The prompt as what a user says, with the special tokens of the chat template."""
    for content in (prompt, [{"type": "text", "text": prompt}]):  # templates of models that also see want parts
        with refused("the model's chat template does not take the prompt"):
            messages = [{"role": "user", "content": content}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if isinstance(text, str) and prompt.strip() in text:
            return text
    raise InputError("the model's chat template leaves the prompt out; --no-chat lets the model continue it")


def _settings(own: GenerationConfig, request: Request, new_tokens: int) -> GenerationConfig:
    """The model's own, with what was asked for, one token of one answer after the other."""
    settings = copy.deepcopy(own)
    settings.max_length, settings.max_new_tokens = None, new_tokens
    settings.min_length = min(settings.min_length or 0, new_tokens)
    settings.min_new_tokens = min(settings.min_new_tokens or 0, new_tokens)
    settings.num_beams = settings.num_return_sequences = 1
    settings.penalty_alpha = settings.prompt_lookup_num_tokens = None
    if request.temperature == 0:
        settings.do_sample, settings.temperature, settings.top_p, settings.top_k = False, 1.0, 1.0, 50
    elif request.temperature is not None:
        settings.do_sample, settings.temperature = True, request.temperature
    if settings.pad_token_id is None:
        settings.pad_token_id = 0  # one row is never padded, and transformers warns of what it chooses itself
    return settings


def _ends(settings: GenerationConfig) -> list[int]:
    """The tokens that end a text."""
    ends = settings.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


class _Observed(TextStreamer):
    """Hands on what is finished, and keeps the last token and when every one came; the first time is when the prompt
    went in."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.times: list[float] = []
        self.last: int | None = None

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.last = int(value.flatten()[-1])
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)
