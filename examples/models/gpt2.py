"""A decoder of Hugging Face's transformers: GPT-2's layers over items instead of words, with random weights.

    pip install transformers
    relaygr model check examples.models.gpt2:make --set model.path=.
    relaygr up --set model.path=. --set model.factory=examples.models.gpt2:make

A behaviour is the token of its item, and a candidate one further token behind the history, whose hidden state a linear
layer turns into scores. So must the decoder be trained.
"""

from __future__ import annotations

from typing import Final

import torch
from transformers import DynamicCache, GPT2Config, GPT2Model

from relaygr_stream import DecoderModel, settings

ITEMS: Final = 10_000
#: n_positions: at least relay.max_prefix_tokens + relay.max_suffix_tokens + 1.
CONFIG: Final = GPT2Config(
    vocab_size=ITEMS, n_positions=4608, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
)


def make(model: settings.Model, device: torch.device, dtype: torch.dtype) -> DecoderModel:
    """The factory."""
    torch.manual_seed(model.seed)
    return DecoderModel(
        GPT2Model(CONFIG),  # yours: GPT2Model.from_pretrained(FOLDER)
        torch.nn.Linear(CONFIG.n_embd, 1),
        device=device,
        dtype=dtype,
        tasks=("click",),
        config=CONFIG.to_dict(),
        behaviours=lambda tokens: {"input_ids": tokens.array[0] % ITEMS},
        candidates=lambda one: {"input_ids": one.candidates % ITEMS},
        cache=DynamicCache,
        note=f"random weights, seed {model.seed}",
    )
