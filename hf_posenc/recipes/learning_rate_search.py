"""Finding a learning rate: a few training steps with every candidate, all from the same start."""

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

SET_ASIDE = 8192
"""Number of training tokens to compare rates on, at most a tenth of the text. No trial trains on them."""


def check(arguments: FineTuningArguments) -> None:
    """Raise UsageError for rates that cannot be tried. Call this before `learning_rate` gets its default."""
    rates = arguments.find_learning_rate
    if not rates:
        return
    each_once(arguments, "find_learning_rate")
    if len(rates) < 2 or not all(0 < rate < math.inf for rate in rates):
        raise UsageError(f"--find-learning-rate takes two or more positive rates, not {' '.join(map(str, rates))}")
    if arguments.learning_rate is not None:
        raise UsageError("--find-learning-rate chooses --learning-rate: give only one of them")


def check_plan(phase: Phase, arguments: FineTuningArguments, accelerator: Accelerator) -> None:
    """Raise UsageError if the text is too short to try rates, or weights cannot be restored after a trial.

    Args:
        phase: first phase of the training.
        arguments: checked options.
        accelerator: accelerator of the training.
    """
    if not arguments.find_learning_rate:
        return
    if accelerator.distributed_type == "DEEPSPEED":
        raise UsageError(
            "--find-learning-rate restores weights, but DeepSpeed does not give access to them: give --learning-rate"
        )
    groups = accelerator.num_processes // arguments.context_parallel
    trained = min(TRIAL_STEPS, phase.steps) * arguments.gradient_accumulation * phase.rows * groups
    needed = trained + windows_set_aside(phase)
    if len(phase.windows) < needed:
        raise UsageError(
            f"--find-learning-rate needs {needed * phase.length:,} tokens of training text, "
            f"but there are {phase.windows.total:,}: give more text, or --learning-rate"
        )


def windows_set_aside(phase: Phase) -> int:
    """Return the number of windows on which rates are compared."""
    return max(1, min(SET_ASIDE // phase.length, len(phase.windows) // 10))


def find(
    rates: list[float],
    phase: Phase,
    wrapped: nn.Module,
    optimizer: AcceleratedOptimizer,
    one_step: Callable[[int], float],
    say: Callable[[str], None],
) -> Results:
    """Try every rate. Afterwards weights, optimizer and random generators are as before, bit for bit.

    Args:
        rates: rates to try.
        phase: first phase of the training.
        wrapped: the model as accelerate wrapped it.
        optimizer: the optimizer as accelerate wrapped it, before its first step.
        one_step: function that makes the training step with a given number.
        say: function that prints on the main process.

    Returns:
        The loss after training with every rate, and the rate with the lowest loss.

    Raises:
        Diverged: the loss is finite with none of the rates.
    """
    count, steps = len(phase.windows), min(TRIAL_STEPS, phase.steps)
    tokens = phase.windows.tokens[order(phase.seed, count, count - windows_set_aside(phase), count)].flatten()
    tried = []
    for rate in rates:
        with restored(wrapped, optimizer):
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
        raise Diverged("--find-learning-rate: the loss is finite with none of the rates: try lower ones")
    chosen = min(finite, key=lambda trial: trial["loss"])["rate"]
    return {"steps": steps, "tokens": len(tokens), "tried": tried, "chosen": chosen}


@contextmanager
def restored(wrapped: nn.Module, optimizer: AcceleratedOptimizer) -> Iterator[None]:
    """Context manager that restores trained weights, random generators, and an optimizer before its first step.

    The loss scale of fp16 is not restored.
    """
    # The optimizer's weights: while FSDP has gathered the shards of a layer, the model holds other tensors.
    weights = [(weight, weight.detach().clone()) for group in optimizer.param_groups for weight in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for weight, old in weights:
                weight.copy_(old)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass may have left gathered weights as they were
        optimizer.optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
