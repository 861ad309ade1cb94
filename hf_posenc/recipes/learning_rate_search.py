"""Finding a learning rate: a few training steps at each of some rates, all from the same start."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..evaluation import non_overlapping_perplexity
from .corpus import order
from .options import UsageError, each_once
from .results import Results
from .training import TRIAL_STEPS, Diverged, FineTuningArguments, Phase

ASIDE = 8192
"""Tokens of the training text that no trial trains on, to compare by: at most a tenth of it, at least one window."""


def check(arguments: FineTuningArguments) -> None:
    """Raise UsageError for rates that cannot be tried. Call it before the learning rate gets its default."""
    rates = arguments.find_learning_rate
    if not rates:
        return
    each_once(arguments, "find_learning_rate")
    if len(rates) < 2 or not all(0 < rate < math.inf for rate in rates):
        raise UsageError(f"--find-learning-rate takes two or more positive rates, not {' '.join(map(str, rates))}")
    if arguments.learning_rate is not None:
        raise UsageError("--find-learning-rate finds what --learning-rate says: give one of them")


def check_plan(phase: Phase, arguments: FineTuningArguments, accelerator: Accelerator) -> None:
    """Raise UsageError unless the text suffices to try rates, and the weights can be put back.

    Args:
        phase: the first of the training.
        arguments: checked.
        accelerator: that runs it.
    """
    if not arguments.find_learning_rate:
        return
    if accelerator.distributed_type == "DEEPSPEED":
        raise UsageError(
            "--find-learning-rate puts weights back, which DeepSpeed keeps to itself: give --learning-rate"
        )
    groups = accelerator.num_processes // arguments.context_parallel
    trained = min(TRIAL_STEPS, phase.steps) * arguments.gradient_accumulation * phase.rows * groups
    if len(phase.windows) < trained + aside(phase):
        raise UsageError(
            f"--find-learning-rate needs {(trained + aside(phase)) * phase.length:,} tokens of training text, there "
            f"are {phase.windows.total:,}: give more text, or --learning-rate"
        )


def aside(phase: Phase) -> int:
    """Return the number of windows that no trial trains on."""
    return max(1, min(ASIDE // phase.length, len(phase.windows) // 10))


def find(
    rates: list[float],
    phase: Phase,
    wrapped: nn.Module,
    optimizer: AcceleratedOptimizer,
    one_step: Callable[[int], float],
    say: Callable[[str], None],
) -> Results:
    """Try each rate. Afterwards weights, optimizer and random generators are as before, bit for bit.

    Args:
        rates: to try.
        phase: the first of the training.
        wrapped: the model as accelerate wrapped it.
        optimizer: likewise, before its first step.
        one_step: makes the training step of a number.
        say: prints on one process.

    Returns:
        The loss after each rate, and the rate with the lowest.

    Raises:
        Diverged: the loss is not finite after any of them.
    """
    count, steps = len(phase.windows), min(TRIAL_STEPS, phase.steps)
    tokens = phase.windows.tokens[order(phase.seed, count, count - aside(phase), count)].flatten()
    tried = []
    for rate in rates:
        with as_it_was(wrapped, optimizer):
            wrapped.train()
            for step in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = rate * min(1.0, (step + 1) / (TRIAL_STEPS // 3))
                one_step(step)
            loss = non_overlapping_perplexity(wrapped, tokens, length=phase.length).loss
        say(f"  learning rate {rate:g}: loss {loss:.4f} after {steps} steps")
        tried.append({"rate": rate, "loss": loss})
    finite = [trial for trial in tried if math.isfinite(trial["loss"])]
    if not finite:
        raise Diverged("--find-learning-rate: the loss is no number after any of them: try lower ones")
    chosen = min(finite, key=lambda trial: trial["loss"])["rate"]
    return {"steps": steps, "tokens": len(tokens), "tried": tried, "chosen": chosen}


@contextmanager
def as_it_was(wrapped: nn.Module, optimizer: AcceleratedOptimizer) -> Iterator[None]:
    """Context manager that puts back trained weights, random generators and an optimizer that has made no step.

    Only the scale that fp16 multiplies losses with stays where the steps inside left it.
    """
    # Those that the optimizer holds: while a layer's parts are together, under FSDP, the model holds others.
    weights = [(weight, weight.detach().clone()) for group in optimizer.param_groups for weight in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for weight, before in weights:
                weight.copy_(before)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward may have left weights together as they were
        optimizer.optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
