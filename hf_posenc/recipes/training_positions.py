"""Positions of training windows: counted, or chosen so that short windows visit the positions of long ones."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc

from .options import UsageError, as_usage_error

PROBE_TOKENS = 16
"""Number of tokens with which a model is asked whether it follows chosen positions."""


@dataclass(frozen=True)
class ChosenPositions:
    """Position ids of training windows, drawn anew for each window of a run.

    `L` is the number of tokens of a window, and `P` is `length`.

    - `pose` (Zhu et al. 2023, arXiv:2309.10400, section 3.2): the window is cut in two chunks at a random place. The
      second counts on from the first, with `u` added, drawn uniformly from `0 .. P - L`. The text of a window stays in
      one piece, the paper's option `v_i = 0`. The authors' code limits the first chunk to half of the window; here all
      cuts are equally likely.
    - `randomised` (Ruoss et al. 2023, arXiv:2305.16843, section 3.1): `L` different ids, drawn uniformly from `0 .. P -
      1` and sorted. The paper draws once for a batch, here each window has its own ids.
    - `real` (arXiv:2602.14050): `L` real numbers, drawn uniformly from 0 to `P - 1` and sorted. For schemes that are
      defined between whole positions, or read no positions; all others refuse them.

    Attributes:
        kind: `pose`, `randomised` or `real`.
        length: number of positions, `P`.
        seed: seed of the draws. The ids of a window depend on this and on the window's number in the run alone.
    """

    kind: str
    length: int
    seed: int

    def inputs(self, windows: range, tokens: int) -> dict[str, Tensor]:
        """Return the inputs of a model that depend on positions, for windows of a run.

        The mask of ones is not redundant: without it transformers takes a skipped position for a new document.

        Args:
            windows: numbers of the windows in the run.
            tokens: tokens in a window.

        Returns:
            `position_ids` (B, T), int64, or float32 for `real`; and `attention_mask` (B, T), int64.
        """
        ids = torch.tensor([self.draw(window, tokens) for window in windows])
        return {"position_ids": ids, "attention_mask": torch.ones(ids.shape, dtype=torch.int64)}

    def draw(self, window: int, tokens: int) -> list[int] | list[float]:
        """Return the ids of one window: sorted, and below `length`. Those that are integers are different."""
        generator = random.Random(f"{self.seed} positions {window}")
        if self.kind == "real":
            return sorted(generator.uniform(0, self.length - 1) for _ in range(tokens))
        if self.kind == "randomised":
            return sorted(generator.sample(range(self.length), tokens))
        cut, skipped = generator.randrange(1, tokens), generator.randint(0, self.length - tokens)
        return [token + skipped * (token >= cut) for token in range(tokens)]


@torch.no_grad()
def check_follows(model: PreTrainedModel, kind: str, length: int) -> None:
    """Raise UsageError if a model cannot take chosen positions below a length, or ignores them."""
    count = min(PROBE_TOKENS, length)
    counted, chosen = torch.arange(count, device=model.device)[None].repeat(2, 1, 1)
    chosen[:, count // 2 :] += length - count
    tokens, shown = counted % model.get_input_embeddings().weight.shape[0], torch.ones_like(counted)
    with as_usage_error(
        f"--positions {kind}: this model takes no such positions: ", TypeError, ValueError, RuntimeError
    ):
        logits = [
            model(input_ids=tokens, position_ids=ids, attention_mask=shown, use_cache=False).logits
            for ids in (counted, chosen.float() if kind == "real" else chosen)
        ]
    if hf_posenc.is_patched(model):  # a scheme may start neutral: verify looks past that
        follows = hf_posenc.verify(model).answers_through == "positions"
    else:
        follows = not torch.equal(*logits)
    if not follows:
        raise UsageError(f"--positions {kind}: this model does not look at positions, so they would change nothing")
