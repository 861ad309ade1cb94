"""The second stage: gradient steps that match attention, its outputs, or the logits to the base's."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..core.dtypes import compute_dtype
from ..core.layer_state import on_decoder
from ..core.modules import PositionModule
from ..model.base_model import BaseModel
from ..model.watch import Args, Kwargs, uncompiled
from .checks import check_one_of, check_positive
from .observe import attending
from .pair import Pair, mean_kl, parameters_of, put, requiring_grad
from .state import StateFile

WEIGHTS = ("scheme", "query_key", "attention", "adapter")

PASSES = {"attention": 4, "outputs": 2, "logits": 4}
"""The losses that the second stage can lower -> time of a step, in passes of the base."""

LOSSES = tuple(PASSES)

LOGIT_RATES = 0.5
"""Rates of the steps that lower `logits`, relative to those of the other losses, whose steps come first."""

Movable = tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]]
"""The parameters that the second stage trains: the scheme's, and weights of the attention."""


@dataclass(frozen=True, kw_only=True)
class Matching:
    """The second stage of `calibrate`: gradient steps that match the outputs and logits of the base.

    Parameters of 16 bits are stepped as float32 copies, which are rounded for the next step.

    Args:
        weights: the parameters to train. `scheme`: only the scheme's parameters. `query_key`: also all weights of the
            attention that make queries and keys. `attention`: all weights of the attention in all layers, of which the
            other layers' move to match `logits`. `adapter`: as `query_key`, if they require gradients, as LoRA's do.
            None means `adapter` for a model with an adapter, and `attention` for any other model. On a base that adds
            a table of positions to its hidden states, `query_key` and `adapter` also mean weights that make values,
            which matched outputs move: they were trained with the table.
        steps: number of steps for each loss.
        batch_size: number of windows in a step.
        rate: learning rate of the scheme's parameters; it falls to 0 as a cosine.
        weight_rate: learning rate of the weights; it falls in the same way.
        loss: the loss to lower. `outputs`: the squared error of the heads' outputs, relative to the mean square of the
            base's values, where each layer reads the patched model's own hidden states and so makes good what the
            layers below it do differently. `logits`: the KL divergence of the next token from the base's, through all
            layers, with half the learning rates. `attention`: the KL divergence from the base's attention, where each
            layer reads the base's hidden states. None means `outputs` and then `logits`, each for `steps` steps; under
            `judge="attention"` it means `attention`.
        seed: seed of the order of windows.
        state_file: file for the state of this stage, written whole or not at all. If the file exists, `calibrate`
            resumes from it and skips the first stage. The result is the same as without an interruption. None means
            no file.
        save_every: number of steps between two states. A state is also written before the first step, after the last,
            and after a step whose `on_step` raises an error.
        on_step: function that is called after each step with its number, from 1, and the mean loss.

    Raises:
        ValueError: for an unknown choice, or a number out of range.
    """

    weights: str | None = None
    steps: int = 50
    batch_size: int = 4
    rate: float = 2e-2
    weight_rate: float = 1e-3
    loss: str | None = None
    seed: int = 0
    state_file: str | os.PathLike[str] | None = None
    save_every: int = 25
    on_step: Callable[[int, float], None] | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        check_one_of("weights", self.weights or WEIGHTS[0], WEIGHTS)
        check_one_of("loss", self.loss or LOSSES[0], LOSSES)
        check_positive("integer", steps=self.steps, batch_size=self.batch_size, save_every=self.save_every)
        check_positive("number", rate=self.rate, weight_rate=self.weight_rate)

    def identity(self) -> dict[str, Any]:
        """Return the fields that the result depends on."""
        irrelevant = ("state_file", "save_every", "on_step")
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in irrelevant}

    def trials(self, judge: str) -> tuple[str, ...]:
        """Return the losses to lower, one after the other."""
        if self.loss is not None:
            return (self.loss,)
        return ("outputs", "logits") if judge == "loss" else ("attention",)

    def generator(self, loss: str) -> torch.Generator:
        """Return the generator of the order of windows; steps that lower `logits` read others than those before."""
        return torch.Generator().manual_seed(self.seed + (loss == "logits"))

    def drawn(self, windows: int, generator: torch.Generator) -> Tensor:
        """Draw the indices of the training windows of a step, (processes, batch_size)."""
        return torch.randint(windows, (process_count(), self.batch_size), generator=generator)


def process_count() -> int:
    """Return the number of processes that calibrate together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def movable(pair: Pair, weights: str | None) -> Movable:
    """Return the parameters that the second stage trains.

    Args:
        pair: a model and its base.
        weights: see `Matching`.

    Raises:
        ValueError: if there are none.
    """
    scheme = parameters_of(module for module in pair.model.modules() if isinstance(module, PositionModule))
    scheme_ids, every = {id(p) for p in scheme}, weights != "adapter"
    others = [] if weights == "scheme" else [p for p in pair.weights if id(p) not in scheme_ids]
    moved = [p for p in others if every or p.requires_grad]
    if not scheme and not moved:
        raise ValueError(f"weights={weights!r} leaves nothing to train: {pair.patch.name} has no parameters of its own")
    return scheme, moved


def match(pair: Pair, trained: Movable, matching: Matching, loss: str, file: StateFile, known: dict[str, Any]) -> None:
    """Match the attention of each layer to the base's by gradient steps.

    Args:
        pair: a model and its base.
        trained: the parameters to train, from `movable`.
        matching: settings of the second stage.
        loss: one of `LOSSES`.
        file: the state file to write, and to resume from where it has content.
        known: what else belongs into it.
    """
    parameters = [p for part in trained for p in part]
    # Closed forms change more than is trained.
    changeable = list(dict.fromkeys([*(p for p, _ in pair.initial_values.values()), *parameters]))
    share = LOGIT_RATES if loss == "logits" else 1.0
    rates, rank = (matching.rate * share, matching.weight_rate * share), dist.get_rank() if dist.is_initialized() else 0
    # In half precision, steps smaller than a weight's last digit would be lost.
    copies = {p: p.detach().float() for p in parameters if p.dtype != compute_dtype(p)}
    moved = [[copies.get(p, p) for p in part] for part in trained]
    optimizer = torch.optim.Adam([{"params": part, "peak": r} for part, r in zip(moved, rates, strict=True) if part])
    generator = matching.generator(loss)

    def save(step: int) -> None:
        if rank == 0:
            now = {"step": step, "optimizer": optimizer.state_dict(), "random": generator.get_state()}
            file.save(known | now | {"values": [copies.get(p, p).detach() for p in changeable]})

    done = 0
    if state := file.content:
        done, file.content = state["step"], None  # the next trial begins anew
        put(zip((copies.get(p, p) for p in changeable), state["values"], strict=True))
        put(copies.items())
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["random"])
    else:
        save(0)
    add = {"attention": _add_attention_gradients, "outputs": add_output_gradients, "logits": add_logit_gradients}[loss]
    steps = range(done + 1, matching.steps + 1)
    bar = tqdm(steps, "calibrating", matching.steps, initial=done, unit="step", disable=not pair.progress)
    with bar, ExitStack() as at_end, requiring_grad(parameters), attending(pair.model, pair.base_model):
        at_end.callback(clear := nn.ParameterList(parameters).zero_grad)
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * 0.5 * (1 + math.cos(math.pi * (step - 1) / matching.steps))
            order = matching.drawn(len(pair.train), generator)
            value = add(pair, pair.train[order[rank].to(pair.train.device)], parameters)
            for p in parameters:
                if p.grad is not None and process_count() > 1:
                    dist.all_reduce(p.grad)
                    p.grad /= process_count()
            for p, copied in copies.items():
                copied.grad = None if p.grad is None else p.grad.float()
            optimizer.step()
            put(copies.items())
            clear()
            bar.set_postfix({loss: f"{value:.3f}"}, refresh=False)
            try:
                if matching.on_step is not None:
                    matching.on_step(step, value)
            except BaseException:
                save(step)
                raise
            if step % matching.save_every == 0 or step == matching.steps:
                save(step)


def _add_attention_gradients(pair: Pair, tokens: Tensor, parameters: Sequence[nn.Parameter]) -> float:
    """Add the gradients of every layer's divergence on a batch, and return the mean divergence over layers."""
    theirs, call = pair.layer_calls(tokens)
    value = 0.0
    for index in pair.layers:
        loss = mean_kl(theirs[index].call, call(index))
        if loss.requires_grad:
            _add_gradients(loss, parameters)
        value += loss.item()
    return value / len(pair.layers)


def _add_gradients(
    loss: Tensor, parameters: Sequence[nn.Parameter], grad_outputs: Tensor | None = None, *, retain_graph: bool = False
) -> None:
    """Add the gradients of a loss, or of outputs whose gradient is given, to those of parameters it depends on."""
    gradients = torch.autograd.grad(loss, parameters, grad_outputs, retain_graph, allow_unused=True)
    for p, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            p.grad = gradient if p.grad is None else p.grad + gradient


def add_output_gradients(pair: Pair, tokens: Tensor, parameters: Sequence[nn.Parameter]) -> float:
    """Add the gradients of every layer's output error on a batch, and return the mean error over layers.

    The error is the mean squared error of the heads' outputs, relative to the mean square of the base's values. Each
    layer of the patched model reads this model's own hidden states. Gradients are taken at each attention, as soon as
    it is computed, and stop at the input of its layer. So no layer waits for those above it, and a layer makes good
    what the layers below it do differently.

    Args:
        pair: a model and its base, within `attending`.
        tokens: (B, T) windows.
        parameters: parameters that require gradients.
    """
    with pair.as_base() as base:
        wanted = _outputs_of_base(base, tokens, pair.layers)
    modules, lenders = pair.base_model.modules, set(pair.lenders.values())
    first = modules.layers[0] if on_decoder(modules.decoder).at_first else None
    errors: list[float] = []

    def enter(index: int, layer: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        torch.set_grad_enabled(True)
        if first is None or index == 0:
            return None
        # The hidden states hold the vectors of the input already, as constants: what is added has only a gradient.
        vectors = first.get_submodule("posenc")(torch.arange(tokens.shape[1], device=tokens.device)[None])
        change = vectors - vectors.detach()
        if args:
            return (args[0] + change.to(args[0]), *args[1:]), kwargs
        hidden = kwargs["hidden_states"]
        return args, kwargs | {"hidden_states": hidden + change.to(hidden)}

    def leave(index: int, module: nn.Module, args: Args, outputs: Any) -> Any:
        output, weights = outputs
        if index in wanted:
            base_output, square = wanted.pop(index)
            dtype = compute_dtype(output)
            error = (output.to(dtype) - base_output.to(dtype)).square().mean() / square
            if error.requires_grad:
                _add_gradients(error, parameters, retain_graph=index in lenders)
            errors.append(error.item())
        torch.set_grad_enabled(False)
        return output.detach(), weights

    with torch.no_grad(), uncompiled(), ExitStack() as hooks:
        for index in pair.watched:
            layer, module = modules.layers[index], modules.attention_of[index].get_submodule("posenc")
            entered = layer.register_forward_pre_hook(partial(enter, index), prepend=True, with_kwargs=True)
            hooks.callback(entered.remove)
            hooks.callback(module.register_forward_hook(partial(leave, index)).remove)
        pair.model.base_model(tokens, use_cache=False)
    return sum(errors) / len(errors)


def add_logit_gradients(pair: Pair, tokens: Tensor, parameters: Sequence[nn.Parameter]) -> float:
    """Add the gradients of the next token's KL divergence from the base's on a batch, and return its mean in nats.

    One window at a time, because logits, and what the backward pass of all layers needs, take the most memory.

    Args:
        pair: a model and its base, within `attending`.
        tokens: (B, T) windows.
        parameters: parameters that require gradients.
    """
    value: Tensor | float = 0.0
    for window in tokens.split(1):
        with torch.no_grad(), pair.as_base() as base, attending(base, BaseModel.of(base)):
            wanted = _log_probabilities(base(window, use_cache=False).logits)
        with uncompiled():
            logits = pair.model(window, use_cache=False).logits
        found, shares = _log_probabilities(logits.detach()), wanted.exp()
        value += wanted.sub_(found).mul_(shares).sum()
        # By hand: autograd would write several more tensors of this size, the largest of all.
        _add_gradients(logits, parameters, found.exp_().sub_(shares).div_(tokens.numel()).to(logits.dtype))
    return float(value) / tokens.numel()


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.to(compute_dtype(logits)).log_softmax(-1)


@torch.no_grad()
def _outputs_of_base(base: PreTrainedModel, tokens: Tensor, layers: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Run the base, and return layer index -> its heads' outputs, (B, T, H, V), and the mean square of its values.

    The mean is over all processes. So the mean of the processes' errors is the error of all their windows.
    """
    found = {}

    def record(index: int, module: nn.Module, args: Args, outputs: Any) -> None:
        square = args[0].value.to(compute_dtype(args[0].value)).square().mean()
        if dist.is_initialized():
            dist.all_reduce(square)
            square /= process_count()
        found[index] = outputs[0], square

    base_model = BaseModel.of(base)
    with attending(base, base_model), ExitStack() as hooks:
        for index in layers:
            module = base_model.modules.attention_of[index].get_submodule("posenc")
            hooks.callback(module.register_forward_hook(partial(record, index)).remove)
        base.base_model(tokens, use_cache=False)
    return found
