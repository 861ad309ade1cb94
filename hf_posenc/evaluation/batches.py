"""Forward passes of an evaluation: batches, and the share of each process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..model.eval_mode import evaluation
from ..model.logits import LogitsOf, logits_function, token_losses

TOKENS_PER_BATCH = 8192
"""Default number of tokens in a batch, about."""
TOKENS_PER_CPU_BATCH = 1024
"""Default number of tokens in a batch on a CPU. Larger batches do not fit its caches and are no faster."""


@dataclass(frozen=True)
class Reader:
    """A model in evaluation mode and without gradients, with its share of the work.

    Attributes:
        logits_of: function that returns the logits of windows, see `logits_function`.
        device: device of the model.
        rank: number of this process, from 0.
        world: number of processes that share the work.
        progress: whether to show progress bars.
    """

    logits_of: LogitsOf
    device: torch.device
    rank: int
    world: int
    progress: bool

    def batches(self, shapes: Sequence[tuple[int, ...]], batch_size: int | None = None) -> list[list[int]]:
        """Return batches of indices of items that have the same shape, shapes in the order of their first items.

        Args:
            shapes: shapes of the items; each begins with the number of tokens.
            batch_size: largest number of items in a batch. None means about 8192 tokens, 1024 on a CPU.

        Raises:
            ValueError: if `batch_size` is under 1.
        """
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        tokens = TOKENS_PER_CPU_BATCH if self.device.type == "cpu" else TOKENS_PER_BATCH
        batches: list[list[int]] = []
        for shape in dict.fromkeys(shapes):
            indices = [index for index, each in enumerate(shapes) if each == shape]
            most = batch_size or max(1, tokens // shape[0])
            batches += [indices[start : start + most] for start in range(0, len(indices), most)]
        return batches

    def losses(self, windows: Tensor, scored: int) -> Tensor:
        """Return the losses of the last `scored` tokens of windows (B, T), (B, scored) float64 on the CPU."""
        size = windows.shape[1]
        windows = windows.to(self.device)
        # Token t is predicted by the output at t - 1.
        pieces = self.logits_of(windows, slice(size - scored - 1, size - 1))
        losses = list(token_losses(pieces, windows[:, size - scored :].reshape(-1)))
        return torch.cat(losses).view(len(windows), scored).cpu().double()

    def scores(
        self,
        shapes: Sequence[tuple[int, ...]],
        score: Callable[[list[int]], Tensor],
        row: tuple[int, ...],
        unit: str,
        batch_size: int | None = None,
    ) -> Tensor:
        """Divide the batches among the processes, and return the scores of all items in all processes.

        All processes run the same number of forward passes, because FSDP needs all of them in each pass. A process
        without a batch repeats the first one. The scores of an item are computed in one process and zero in the others,
        so their sum is exact.

        Args:
            shapes: shapes of the items, see `batches`.
            score: indices of a batch -> scores of its items, (batch, *row).
            row: shape of the scores of one item.
            unit: name of an item, for the progress bar.
            batch_size: largest number of items in a batch, see `batches`.

        Returns:
            (items, *row) float64 on the CPU.
        """
        batches = self.batches(shapes, batch_size)
        rows = torch.zeros(len(shapes), *row, dtype=torch.float64)
        with tqdm(total=len(rows), unit=unit, leave=False, disable=not self.progress) as bar:
            for number in range(self.rank, self.world * math.ceil(len(batches) / self.world), self.world):
                batch = batches[number] if number < len(batches) else batches[0]
                scores = score(batch)
                if number < len(batches):
                    rows[batch] = scores
                bar.update(len(batch) * self.world)
        if self.world > 1:
            rows = rows.to(self.device)
            dist.all_reduce(rows)
        return rows.cpu()


@contextmanager
def reading(model: nn.Module, tokens: Tensor, *, distributed: bool = False, progress: bool = False) -> Iterator[Reader]:
    """Read a model within a `with` block.

    Args:
        model: a causal language model; set to eval mode and back.
        tokens: (N,) for the trial of `logits_function`, the same in all processes.
        distributed: divide batches among the processes of `torch.distributed`.
        progress: show progress bars.

    Raises:
        ValueError: for `distributed` without an initialised process group.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    with evaluation(model), torch.no_grad():
        yield Reader(logits_function(model, tokens), next(model.parameters()).device, rank, world, progress)
