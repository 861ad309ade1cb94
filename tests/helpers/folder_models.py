"""The models that processes save and look for in one folder: two schemes, two depths, one file or several."""

from __future__ import annotations

import torch
from families import tokens
from situations import patched_model
from torch import Tensor
from transformers import PreTrainedModel


def states() -> list[tuple[PreTrainedModel, str]]:
    """Return models, each with the largest size of a file of its weights."""
    return [
        (patched_model("alibi", "llama"), "50GB"),
        (patched_model("shaw", "llama", seed=1), "20KB"),
        (patched_model("alibi", "llama", seed=2, num_hidden_layers=3), "20KB"),
        (patched_model("shaw", "llama", seed=3, rms_norm_eps=0.1), "50GB"),
    ]


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Return what tells the models apart."""
    return model(tokens(1, 12), use_cache=False).logits
