"""Modules that several files of tests convert."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def make_gpt2(dropout: float) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=61,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)
