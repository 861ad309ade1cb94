"""The second stage: gradient steps that match each layer's attention, or its outputs, to the base's."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..did_you_mean import did_you_mean
from ..modules import PositionModule
from .observe import attending
from .output_error import add_gradients, add_output_gradients
from .pair import Pair, mean_kl, parameters_of
from .state import StateFile

WEIGHTS = ("scheme", "query_key", "adapter")


LOSSES = ("attention", "outputs")
"""The losses that the second stage can lower."""

Movable = tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]]
"""The parameters that the second stage trains: the scheme's, and weights that make queries and keys."""


@dataclass(frozen=True, kw_only=True)
class Matching:
    """The second stage of `calibrate`: gradient steps that match each layer to the base's.

    Args:
        weights: the parameters to train. `scheme`: only the scheme's parameters. `query_key`: also all weights of the
            attention that make queries and keys. `adapter`: also such weights if they require gradients, as LoRA's do.
            None means `adapter` for a model with an adapter, and `query_key` for any other model. On a base that adds
            a table of positions to its hidden states, `query_key` and `adapter` also mean weights that make values,
            which matched outputs move: they were trained with the table.
        steps: number of steps.
        batch_size: number of windows in a step.
        rate: learning rate of the scheme's parameters; it falls to 0 as a cosine.
        weight_rate: learning rate of the weights; it falls in the same way.
        loss: the loss to lower. `outputs`: the squared error of the heads' outputs, relative to the mean square of the
            base's values, where each layer reads the patched model's own hidden states and so makes good what the
            layers below it do differently. `attention`: the KL divergence from the base's attention, where each layer
            reads the base's hidden states. None means `outputs`, and then `attention` if the model predicts worse after
            `outputs` by more than 0.01 nats; under `judge="attention"` it means `attention`.
        lengths: lengths of the windows in tokens. Each length gets an equal share of the steps, in this order. The
            windows of `tokens` are cut to it, so it must divide their length. None means uncut windows.
        seed: seed of the order of windows.
        state_file: file for the state of this stage, written whole or not at all. If the file exists, `calibrate`
            resumes from it and skips the first stage. The result is the same as without an interruption. None means
            no file.
        save_every: number of steps between two states. A state is also written before the first step, after the last,
            and after a step whose `on_step` raises an error.
        on_step: function that is called after each step with its number, from 1, and the mean loss.

    Raises:
        ValueError: for an unknown choice, a number out of range, or a field that would change nothing.
    """

    weights: str | None = None
    steps: int = 100
    batch_size: int = 4
    rate: float = 2e-2
    weight_rate: float = 1e-3
    loss: str | None = None
    lengths: Sequence[int] | None = None
    seed: int = 0
    state_file: str | os.PathLike[str] | None = None
    save_every: int = 25
    on_step: Callable[[int, float], None] | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.weights is not None:
            check_one_of("weights", self.weights, WEIGHTS)
        if self.loss is not None:
            check_one_of("loss", self.loss, LOSSES)
        check_counts(steps=self.steps, batch_size=self.batch_size, save_every=self.save_every)
        check_positive(rate=self.rate, weight_rate=self.weight_rate)
        check_integers(seed=self.seed)
        if self.weights == "scheme" and self.weight_rate != Matching.weight_rate:
            raise ValueError("weight_rate changes nothing with weights='scheme': leave it out")
        if self.state_file is None and self.save_every != Matching.save_every:
            raise ValueError("save_every changes nothing without a state_file: leave it out")
        if self.state_file is not None:
            object.__setattr__(self, "state_file", Path(self.state_file))
        if self.lengths is not None:
            object.__setattr__(self, "lengths", tuple(self.lengths))
            for length in self.lengths:
                check_integers(lengths=length)
            if not 0 < len(self.lengths) <= self.steps:
                raise ValueError(
                    f"{self.steps} steps cannot be divided among the {len(self.lengths)} lengths {self.lengths}"
                )

    def check_length(self, whole: int) -> None:
        """Raise ValueError unless windows of `whole` tokens can be cut to all `lengths`."""
        for length in self.lengths or ():
            if length < 2 or whole % length:
                raise ValueError(
                    f"windows of {whole} tokens cannot be cut into windows of {length}: lengths must divide {whole}"
                )

    def identity(self) -> dict[str, Any]:
        """Return the fields that the result depends on."""
        irrelevant = ("state_file", "save_every", "on_step")
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in irrelevant}

    def trials(self, judge: str) -> tuple[str, ...]:
        """Return the losses to try. Each starts from the first stage's weights, until the judge accepts a result."""
        if self.loss is not None:
            return (self.loss,)
        return ("outputs", "attention") if judge == "loss" else ("attention",)

    def read(self, windows: int, processes: int) -> set[int]:
        """Return the indices of all training windows that the steps of one trial read."""
        generator = torch.Generator().manual_seed(self.seed)
        return {i for _ in range(self.steps) for i in self.drawn(windows, processes, generator).flatten().tolist()}

    def drawn(self, windows: int, processes: int, generator: torch.Generator) -> Tensor:
        """Draw the indices of the training windows of a step, (processes, batch_size)."""
        return torch.randint(windows, (processes, self.batch_size), generator=generator)

    def cut(self, step: int, tokens: Tensor) -> Tensor:
        """Cut the windows (B, T) of a step, counted from 1, to the step's length: (B * T / length, length)."""
        if self.lengths is None:
            return tokens
        return tokens.reshape(-1, self.lengths[(step - 1) * len(self.lengths) // self.steps])


def movable(pair: Pair, weights: str | None) -> Movable:
    """Return the parameters that the second stage trains.

    Args:
        pair: a model and its base.
        weights: see `Matching`.

    Raises:
        ValueError: if there are none.
    """
    scheme = parameters_of(module for module in pair.model.modules() if isinstance(module, PositionModule))
    scheme_ids = {id(p) for p in scheme}
    query_key = [] if weights == "scheme" else [p for p in pair.query_key if id(p) not in scheme_ids]
    query_key = [p for p in query_key if weights == "query_key" or p.requires_grad]
    if not scheme and not query_key:
        raise ValueError(f"weights={weights!r} leaves nothing to train: {pair.patch.name} has no parameters of its own")
    return scheme, query_key


def match(
    pair: Pair,
    trained: Movable,
    matching: Matching,
    loss: str,
    state: StateFile,
    on_step: Callable[[int, float], None],
) -> None:
    """Match the attention of each layer to the base's by gradient steps.

    Args:
        pair: a model and its base.
        trained: the parameters to train, from `movable`.
        matching: settings of the second stage.
        loss: one of `LOSSES`.
        state: the state to resume from and to write.
        on_step: function that is called after each step, see `Matching`.
    """
    parameters = [p for part in trained for p in part]
    rates = (matching.rate, matching.weight_rate)
    groups = [{"params": part, "lr": rate} for part, rate in zip(trained, rates, strict=True) if part]
    optimizer = torch.optim.Adam(groups)
    peaks = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(matching.seed)
    processes, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    done = state.step
    state.restore(optimizer, generator)
    if rank == 0 and done == 0:
        state.save(0, optimizer, generator)
    with _with_gradients(parameters), attending(pair.model, pair.base_model):
        for step in range(done + 1, matching.steps + 1):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * 0.5 * (1 + math.cos(math.pi * (step - 1) / matching.steps))
            order = matching.drawn(len(pair.train), processes, generator)
            drawn = pair.train[order[rank].to(pair.train.device)]
            add = add_output_gradients if loss == "outputs" else _add_attention_gradients
            value = add(pair, matching.cut(step, drawn), parameters)
            for p, alone in pair.value_parts:
                if p.grad is not None:
                    p.grad.masked_fill_(alone, 0.0)
            if processes > 1:
                _average(parameters, processes)
            optimizer.step()
            optimizer.zero_grad()
            due = step % matching.save_every == 0 or step == matching.steps
            try:
                on_step(step, value)
            except BaseException:
                due = True
                raise
            finally:
                if rank == 0 and due:
                    state.save(step, optimizer, generator)


@contextmanager
def _with_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let all parameters require gradients. Afterwards delete the gradients and restore `requires_grad`."""
    frozen = [p for p in parameters if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
        for p in parameters:
            p.grad = None


def _average(parameters: Sequence[nn.Parameter], processes: int) -> None:
    """Average the gradients of parameters over all processes."""
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG if p.is_cuda else dist.ReduceOp.SUM)
            p.grad /= 1 if p.is_cuda else processes


def _add_attention_gradients(pair: Pair, tokens: Tensor, parameters: Sequence[nn.Parameter]) -> float:
    """Add the gradients of every layer's divergence on a batch, and return the mean divergence over layers."""
    theirs, inputs = pair.layer_inputs(tokens)
    value = 0.0
    for index, (hidden, arguments) in inputs.items():
        loss = mean_kl(theirs[index].call, pair.call(index, hidden, arguments))
        if loss.requires_grad:
            add_gradients(loss, parameters)
        value += loss.item()
    return value / len(inputs)


def check_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless an argument has one of its choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}{did_you_mean(value, choices)}")


def check_integers(**numbers: object) -> None:
    """Raise ValueError unless all arguments are integers."""
    for name, number in numbers.items():
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise ValueError(f"{name} must be an integer, not {number!r}")


def check_positive(**numbers: object) -> None:
    """Raise ValueError unless all arguments are positive and finite numbers."""
    for name, number in numbers.items():
        if not isinstance(number, Real):
            raise ValueError(f"{name} must be a number, not {number!r}")
        if not 0 < float(number) < math.inf:
            raise ValueError(f"{name} must be positive, not {number}")


def check_counts(**numbers: object) -> None:
    """Raise ValueError unless all arguments are positive integers."""
    check_integers(**numbers)
    check_positive(**numbers)


def check_given_counts(**numbers: object) -> None:
    """Raise ValueError unless all arguments that are not None are positive integers."""
    check_counts(**{name: number for name, number in numbers.items() if number is not None})
