"""Attention matched to the base's, layer by layer, by gradient steps on the base's own hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..call import Call
from ..modules import PositionModule
from .maps import attending, outputs_of, parts
from .pair import Pair, mean_kl
from .state import StateFile


@dataclass(frozen=True)
class Matching:
    """How the second stage goes: those arguments of `calibrate` that only it reads, with what they are by default."""

    weights: str = "query_key"
    steps: int = 100
    batch_size: int = 4
    rate: float = 2e-2
    weight_rate: float = 1e-3
    loss: str | None = None
    lengths: tuple[int, ...] | None = None
    seed: int = 0
    state_file: Path | None = None
    save_every: int = 25

    def trials(self, judge: str) -> tuple[str, ...]:
        """Return what is matched, one after the other until the judge is content."""
        return (
            (self.loss,) if self.loss is not None else ("attention", "outputs") if judge == "loss" else ("attention",)
        )

    def read(self, windows: int, processes: int) -> set[int]:
        """Return which of the training windows all steps of a trial draw, by index."""
        generator = torch.Generator().manual_seed(self.seed)
        return {i for _ in range(self.steps) for i in self.drawn(windows, processes, generator).flatten().tolist()}

    def drawn(self, windows: int, processes: int, generator: torch.Generator) -> Tensor:
        """Draw the training windows of a step, (processes, batch_size) indices."""
        return torch.randint(windows, (processes, self.batch_size), generator=generator)

    def windows(self, step: int, tokens: Tensor) -> Tensor:
        """Return the windows of a step, counted from 1, cut to its length: (B, T) becomes (B * T / length, length)."""
        if self.lengths is None:
            return tokens
        return tokens.reshape(-1, self.lengths[(step - 1) * len(self.lengths) // self.steps])


def movable(pair: Pair, weights: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return what the second stage moves: the scheme's parameters, and weights that make queries and keys.

    Args:
        pair: a model and its base.
        weights: as in `calibrate`.
    """
    scheme = [p for module in pair.model.modules() if isinstance(module, PositionModule) for p in module.parameters()]
    scheme = list({id(p): p for p in scheme}.values())
    if weights == "scheme":
        return scheme, []
    own = {id(p) for p in scheme}
    reached = [p for p in pair.query_key if id(p) not in own]
    return scheme, [p for p in reached if weights == "query_key" or p.requires_grad]


def match(
    pair: Pair,
    moved: tuple[list[nn.Parameter], list[nn.Parameter]],
    how: Matching,
    loss: str,
    state: StateFile | None,
    on_step: Callable[[int, float], None] | None,
) -> None:
    """Match each layer to the base's by gradient steps on what `movable` returned.

    Args:
        pair: a model and its base.
        moved: from `movable`.
        how: the choices that were made.
        loss: what is matched, a name in `LOSSES`.
        state: where to go on from, and what to write; None means neither.
        on_step: as in `calibrate`.
    """
    parameters = [p for part in moved for p in part]
    groups = [{"params": each, "lr": rate} for each, rate in zip(moved, (how.rate, how.weight_rate), strict=True)]
    optimizer = torch.optim.Adam([group for group in groups if group["params"]])
    peaks = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(how.seed)
    processes, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    writes = state if rank == 0 else None
    done = 0
    if state is not None:
        done = state.step
        state.restore(optimizer, generator)
    if writes is not None and done == 0:
        writes.save(0, optimizer, generator)
    frozen = [p for p in parameters if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        with attending(pair.model, pair.plan):
            for step in range(done + 1, how.steps + 1):
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * 0.5 * (1 + math.cos(math.pi * (step - 1) / how.steps))
                order = how.drawn(len(pair.train), processes, generator)
                drawn = pair.train[order[rank].to(pair.train.device)]
                value = _gradients(pair, how.windows(step, drawn), parameters, LOSSES[loss])
                if processes > 1:
                    for p in parameters:
                        if p.grad is not None:
                            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG if p.is_cuda else dist.ReduceOp.SUM)
                            p.grad /= 1 if p.is_cuda else processes
                optimizer.step()
                optimizer.zero_grad()
                due = step % how.save_every == 0 or step == how.steps
                try:
                    if on_step is not None:
                        on_step(step, value)
                except BaseException:
                    due = True
                    raise
                finally:
                    if writes is not None and due:
                        writes.save(step, optimizer, generator)
    finally:
        for p in frozen:
            p.requires_grad_(False)
        for p in parameters:
            p.grad = None


def output_error(base: Call, ours: Call) -> Tensor:
    """Return the mean squared error of what the heads read, relative to the mean square of the base's values.

    Over rows, queries, heads and dimensions; where there are several parts, each is run again for its gradient.
    """
    pieces = list(parts(base))
    total = base.query.new_zeros((), dtype=torch.float32)

    def piece(part: slice) -> Tensor:
        return (outputs_of(base, part) - outputs_of(ours, part)).square().mean(-1).sum()

    for part in pieces:
        total = total + (piece(part) if len(pieces) == 1 else checkpoint(piece, part, use_reentrant=False))
    return total / (base.query[..., 0].numel() * base.value.float().square().mean())


LOSSES = {"attention": mean_kl, "outputs": output_error}
"""What the second stage can lower: a function of what the attention of the base and of the scheme was asked."""


def _gradients(
    pair: Pair, tokens: Tensor, parameters: Sequence[nn.Parameter], loss_of: Callable[[Call, Call], Tensor]
) -> float:
    """Add the gradients of the loss of a batch in each layer, and return its mean over layers."""
    theirs, inputs = pair.seen(tokens)
    value = 0.0
    for index, (hidden, seen) in inputs.items():
        base, ours = theirs[index].call, pair.asked(index, hidden, seen)
        loss = loss_of(base, ours)
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for p, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    p.grad = gradient if p.grad is None else p.grad + gradient
        value += loss.item()
    return value / len(inputs)
