"""Positions of training windows that skip some, so that short windows visit the positions of long ones."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc

from .options import UsageError, as_usage_error

PROBE_TOKENS = 16
"""Number of tokens with which a model is asked whether it follows skipped positions."""


@dataclass(frozen=True)
class SkippedPositions:
    """Position ids of training windows, drawn anew for each window of a run: PoSE.

    A window of `L` tokens is cut in two chunks at a random place. The second counts on from the first, with `u` added,
    drawn uniformly from `0 .. P - L` (Zhu et al. 2023, arXiv:2309.10400, section 3.2). The text of a window stays in
    one piece, the paper's option `v_i = 0`. The authors' code limits the first chunk to half of the window; here all
    cuts are equally likely.

    Attributes:
        length: number of positions, `P`.
        seed: seed of the draws. The ids of a window depend on this and on the window's number in the run alone.
    """

    length: int
    seed: int

    def inputs(self, windows: range, tokens: int) -> dict[str, Tensor]:
        """Return the inputs of a model that depend on positions, for windows of a run.

        The mask of ones is not redundant: without it transformers takes a skipped position for a new document.

        Args:
            windows: numbers of the windows in the run.
            tokens: tokens in a window.

        Returns:
            `position_ids` and `attention_mask`, (B, T) int64.
        """
        ids = torch.tensor([self.draw(window, tokens) for window in windows])
        return {"position_ids": ids, "attention_mask": torch.ones_like(ids)}

    def draw(self, window: int, tokens: int) -> list[int]:
        """Return the ids of one window: ascending, and below `length`."""
        generator = random.Random(f"{self.seed} positions {window}")
        cut, skipped = generator.randrange(1, tokens), generator.randint(0, self.length - tokens)
        return [token + skipped * (token >= cut) for token in range(tokens)]


@torch.no_grad()
def check_follows(model: PreTrainedModel, length: int) -> None:
    """Raise UsageError if a model cannot take skipped positions below a length, or ignores them."""
    count = min(PROBE_TOKENS, length)
    counted, skipping = torch.arange(count, device=model.device)[None].repeat(2, 1, 1)
    skipping[:, count // 2 :] += length - count
    tokens, shown = counted % model.get_input_embeddings().weight.shape[0], torch.ones_like(counted)
    with as_usage_error("--pose-length: this model takes no such positions: ", TypeError, ValueError, RuntimeError):
        logits = [
            model(input_ids=tokens, position_ids=ids, attention_mask=shown, use_cache=False).logits
            for ids in (counted, skipping)
        ]
    if hf_posenc.is_patched(model):  # a scheme may start neutral: verify looks past that
        follows = hf_posenc.verify(model).answers_through == "positions"
    else:
        follows = not torch.equal(*logits)
    if not follows:
        raise UsageError("--pose-length: this model does not look at positions, so it would change nothing")
