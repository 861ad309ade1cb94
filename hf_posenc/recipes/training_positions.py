"""Positions of training windows: counted, or chosen so that short windows visit the positions of long ones."""

import random
from dataclasses import dataclass
from typing import Annotated, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc

from .options import Length, Limit, Options, UsageError, as_usage_error, refuse

PLAIN, POSE, RANDOMISED, REAL = "plain", "pose", "randomised", "real"
KINDS = (PLAIN, POSE, RANDOMISED, REAL)
"""Values of `--positions`."""
PROBE_TOKENS = 16
"""Number of tokens with which a model is asked whether it follows chosen positions."""


@dataclass
class PositionArguments(Options):
    """Positions.

    Args:
        positions: plain counts them from 0. pose cuts each window into chunks and skips positions between them;
            randomised draws sorted positions, and real draws them between the integers as well. Windows stay short,
            and meet the distances of long ones. Steps of the recovery, and measurements, keep plain positions.
        position_length: chosen positions are below this number; it must exceed --train-length.
        pose_chunks: chunks of a window with --positions pose.
    """

    positions: Annotated[str, KINDS] = PLAIN
    position_length: Length | None = None
    pose_chunks: Annotated[int, Limit(2)] = 2


def check(arguments: PositionArguments, train_length: int, packing: str) -> None:
    """Raise UsageError for options that have no effect, or that contradict each other."""
    kind, length = arguments.positions, arguments.position_length
    if kind != POSE:
        refuse(arguments, "pose_chunks", f"has no effect with --positions {kind}")
    if kind == PLAIN:
        refuse(arguments, "position_length", "has no effect with --positions plain")
        return
    if length is None or length <= train_length:
        given = "" if length is None else f", not {length}"
        raise UsageError(f"--positions {kind} needs --position-length above --train-length {train_length}{given}")
    if kind == POSE and arguments.pose_chunks > train_length:
        raise UsageError(f"--pose-chunks {arguments.pose_chunks} are more than the tokens of a window, {train_length}")
    if packing == "documents":
        raise UsageError(f"--positions {kind} cannot be combined with --packing documents, which has its own positions")


@dataclass(frozen=True)
class ChosenPositions:
    """Position ids of training windows, drawn anew for each window of a run.

    `L` is the number of tokens of a window, and `P` is `length`.

    - `pose` (Zhu et al. 2023, arXiv:2309.10400, section 3.2): the window is cut into `chunks` at random places. Chunk
      `i` counts on from the chunk before, and `u_i` is added, drawn uniformly from `u_(i-1) .. P - L`, with `u_0 = 0`.
      The text of a window stays in one piece, the paper's option `v_i = 0`. The authors' code limits the first of two
      chunks to half of the window; here all cuts are equally likely.
    - `randomised` (Ruoss et al. 2023, arXiv:2305.16843, section 3.1): `L` different ids, drawn uniformly from `0 .. P -
      1` and sorted. The paper draws once for a batch, here each window has its own ids.
    - `real` (arXiv:2602.14050): `L` real numbers, drawn uniformly from 0 to `P - 1` and sorted. For schemes that are
      defined between whole positions, or read no positions; all others refuse them.

    Attributes:
        kind: `pose`, `randomised` or `real`.
        length: number of positions, `P`.
        chunks: number of chunks.
        seed: seed of the draws. The ids of a window depend on this and on the window's number in the run alone.
    """

    kind: str
    length: int
    chunks: int
    seed: int

    @classmethod
    def of(cls, arguments: PositionArguments, seed: int) -> Self | None:
        """Return the positions that checked options ask for; None for plain ones."""
        if arguments.positions == PLAIN:
            return None
        assert arguments.position_length is not None
        return cls(arguments.positions, arguments.position_length, arguments.pose_chunks, seed)

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
        if self.kind == REAL:
            return sorted(generator.uniform(0, self.length - 1) for _ in range(tokens))
        if self.kind == RANDOMISED:
            return sorted(generator.sample(range(self.length), tokens))
        starts = {0, *generator.sample(range(1, tokens), self.chunks - 1)}
        skipped, ids = 0, []
        for token in range(tokens):
            if token and token in starts:
                skipped = generator.randint(skipped, self.length - tokens)
            ids.append(token + skipped)
        return ids


@torch.no_grad()
def check_follows(model: PreTrainedModel, arguments: PositionArguments) -> None:
    """Raise UsageError if a model cannot take chosen positions, or ignores them. With plain positions do nothing."""
    if arguments.positions == PLAIN:
        return
    assert arguments.position_length is not None
    length = min(PROBE_TOKENS, arguments.position_length)
    counted, chosen = torch.arange(length, device=model.device)[None].repeat(2, 1, 1)
    chosen[:, length // 2 :] += arguments.position_length - length
    tokens, shown = counted % model.get_input_embeddings().weight.shape[0], torch.ones_like(counted)
    if arguments.positions == REAL:
        chosen = chosen.float()
    subject = f"--positions {arguments.positions}: "
    with as_usage_error(f"{subject}this model takes no such positions: ", TypeError, ValueError, RuntimeError):
        logits = [
            model(input_ids=tokens, position_ids=ids, attention_mask=shown, use_cache=False).logits
            for ids in (counted, chosen)
        ]
    if hf_posenc.is_patched(model):  # a scheme may start neutral: verify looks past that
        follows = hf_posenc.verify(model).answers_through == "positions"
    else:
        follows = not torch.equal(*logits)
    if not follows:
        raise UsageError(f"{subject}this model does not look at positions, so they would change nothing")
