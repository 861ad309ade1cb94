"""The fine-tuning loop of the recipes: raw accelerate, exact to resume, on one process or many."""

import importlib.util
import logging
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import get_scheduler

import hf_posenc

from ..schemes.base import PositionModule
from .corpus import IGNORED, Document, Windows, order
from .models import position_table
from .options import UsageError, at_least, one_of, option
from .recovery import Recovery, token_loss

SCHEDULES = ("cosine", "linear", "constant_with_warmup", "warmup_stable_decay")
TRACKERS = ("none", "tensorboard", "wandb", "trackio")


@dataclass
class TrainingArguments:
    """Training."""

    train_length: int = field(default=1024, metadata={"help": "context length to train at, in tokens"})
    steps: int = field(default=150, metadata={"help": "optimizer steps"})
    batch_size: int = field(
        default=1,
        metadata={"help": "sequences of --train-length per forward and process (shorter ones: as many tokens)"},
    )
    gradient_accumulation: int = field(default=2, metadata={"help": "forwards per optimizer step"})
    learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "peak, after warm-up and before the decay; where a recipe calibrates, by default 3e-4, or 1e-3 "
            "with --calibrate none"
        },
    )
    schedule: str = field(default="cosine", metadata={"help": " | ".join(SCHEDULES)})
    warmup_steps: int = field(default=10, metadata={"help": "steps of linear warm-up; at most all of --steps"})
    weight_decay: float = field(
        default=0.01, metadata={"help": "on matrices; vectors and position parameters get none"}
    )
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradients are clipped to this norm"})
    mixed_precision: str | None = field(
        default=None, metadata={"help": "no, bf16 or fp16; by default what accelerate launch says"}
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "compute activations again in the backward pass instead of keeping them"}
    )
    context_parallel: int = field(
        default=1, metadata={"help": "processes that share each sequence, for contexts that do not fit on one"}
    )
    eval_every: int = field(
        default=0, metadata={"help": "steps between points of the recovery curve (held-out loss); 0 for none"}
    )
    save_every: int = field(
        default=0, metadata={"help": "steps between states that --resume goes on from; 0: only when interrupted"}
    )
    tracker: str = field(default="none", metadata={"help": " | ".join(TRACKERS)})
    split_seed: int = field(
        default=0, metadata={"help": "which documents are held out; apart from the seed of a run, so that runs compare"}
    )


@dataclass
class RecoveryArguments:
    """Winning back what the swap costs, with the base at hand."""

    recovery_steps: int | None = field(
        default=None,
        metadata={
            "help": "how many of --steps, the first ones, run at --recovery-length: shorter windows win the loss back "
            "more cheaply; by default half of them, where --train-length is beyond what the base was trained at, or "
            "with --recovery-length"
        },
    )
    recovery_length: int | None = field(
        default=None,
        metadata={
            "help": "their context length; by default the one the base was trained at, or --train-length if that is "
            "less"
        },
    )
    distill: float = field(
        default=0.0,
        metadata={
            "help": "weight of the KL divergence from the unpatched base's predictions, inside its trained window, "
            "beside the text's own loss; 0 turns it off"
        },
    )


def check(arguments: TrainingArguments) -> None:
    """What can be known without text and model."""
    at_least(arguments, 1, "steps", "batch_size", "gradient_accumulation", "context_parallel")
    at_least(arguments, 2, "train_length")
    at_least(arguments, 0, "warmup_steps", "weight_decay", "eval_every", "save_every")
    for name in ("learning_rate", "max_grad_norm"):
        if not getattr(arguments, name) > 0:
            raise UsageError(f"{option(name)} must be positive, not {getattr(arguments, name)}")
    one_of(arguments, "mixed_precision", (None, "no", "bf16", "fp16"))
    one_of(arguments, "schedule", SCHEDULES)
    one_of(arguments, "tracker", TRACKERS)
    # Accelerate itself would go on without a tracker that is missing.
    if arguments.tracker != "none" and importlib.util.find_spec(arguments.tracker) is None:
        raise UsageError(f"--tracker {arguments.tracker}: pip install {arguments.tracker}")


def check_recovery(arguments: Any) -> None:
    """The same of `RecoveryArguments`."""
    at_least(arguments, 0, "distill")
    if arguments.recovery_steps is not None:
        at_least(arguments, 0, "recovery_steps")
    if (arguments.recovery_steps or 0) > arguments.steps:
        raise UsageError(
            f"--recovery-steps {arguments.recovery_steps} are the first of all --steps {arguments.steps}, not more"
        )
    if arguments.recovery_length is None:
        return
    at_least(arguments, 2, "recovery_length")
    if arguments.recovery_steps == 0:
        raise UsageError(f"--recovery-length {arguments.recovery_length} is of --recovery-steps, and there are none")
    if arguments.recovery_length > arguments.train_length:
        raise UsageError(
            f"--recovery-length {arguments.recovery_length} is beyond --train-length {arguments.train_length}"
        )


def accelerator_for(arguments: TrainingArguments, folder: Path) -> Accelerator:
    """One that accumulates as asked and tracks where asked.

    Raises:
        UsageError: if processes were started that accelerate does not join: each would train on its own; if
            `context_parallel` does not divide them.
    """
    accelerator = Accelerator(
        # Without this, several processes on a machine without a GPU would not know of each other; DeepSpeed's would.
        cpu=not torch.accelerator.is_available() and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true",
        mixed_precision=arguments.mixed_precision,
        # Windows come without end, so the end of a pass over the text must not cut an accumulation short.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            arguments.gradient_accumulation, sync_with_dataloader=False
        ),
        log_with=None if arguments.tracker == "none" else arguments.tracker,
        project_dir=folder,
    )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != accelerator.num_processes:
        raise UsageError(f"{started} processes were started, but accelerate runs {accelerator.num_processes} of them")
    if started % arguments.context_parallel:
        raise UsageError(f"--context-parallel {arguments.context_parallel} does not divide the {started} processes")
    return accelerator


@dataclass
class Phase:
    """Steps at one context length."""

    windows: Windows
    steps: int
    first_step: int
    rows: int  # sequences per forward and process
    seed: int  # of the order of the windows

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.windows.length


def phases(arguments: Any, found: list[Document], trained_length: int) -> list[Phase]:
    """Recovery at a short length, then the length that is wanted; equal tokens per step."""
    short = min(arguments.recovery_length or trained_length, arguments.train_length)
    planned = [(short, arguments.recovery_steps), (arguments.train_length, arguments.steps - arguments.recovery_steps)]
    result, first = [], 0
    for length, steps in planned:
        if steps:
            rows = max(1, arguments.batch_size * arguments.train_length // length)
            windows = Windows(found, length, arguments.packing)
            result.append(Phase(windows, steps, first, rows, arguments.seed))
            first += steps
    return result


def check_plan(plan: list[Phase], accelerator: Accelerator) -> None:
    """The training text must suffice for one batch of every phase."""
    for phase in plan:
        needed = phase.rows * accelerator.num_processes
        if len(phase.windows) < needed:
            raise UsageError(
                f"the training text has {phase.windows.total:,} tokens, one batch needs {needed * phase.length:,} "
                f"({accelerator.num_processes} x {phase.rows} x {phase.length}): give more text, a shorter "
                "--train-length or a smaller --batch-size"
            )


@dataclass
class Progress:
    """What a state holds beside weights, optimizer, schedule and random generators."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """For accelerate's save_state."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For accelerate's load_state."""
        vars(self).update(state)


class Interrupted(Exception):
    """A signal asked to stop; the state is saved. `status` is the exit status a shell expects."""

    def __init__(self, signum: int, folder: Path):
        """Say which signal it was, and where the state is."""
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.status, self.folder = 128 + signum, folder


class Diverged(Exception):
    """The loss or a weight is no number any more."""


def fine_tune(
    accelerator: Accelerator,
    model: nn.Module,
    plan: list[Phase],
    arguments: TrainingArguments,
    *,
    folder: Path,
    resume: bool = False,
    teacher: nn.Module | None = None,
    trained_length: int = 0,
    evaluate: Callable[[nn.Module], float] | None = None,
    find_rate: Callable[[nn.Module, torch.optim.Optimizer, Callable[[int], object]], float] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Fine-tunes in place.

    Args:
        accelerator: from `accelerator_for`.
        model: the patched model, on the device, not wrapped.
        plan: from `phases`.
        arguments: rates, schedule and the rest.
        folder: where states go, `folder/state-000100` and so on; only the newest is kept. The caller removes it once
            what follows the training is done.
        resume: go on from the newest state, if there is one.
        teacher: the unpatched base, if `distill` or `transfer_steps` ask for it.
        trained_length: tokens of its trained window.
        evaluate: held-out loss of the model, for the recovery curve.
        find_rate: gives the learning rate in place of the arguments', from the wrapped model, its optimizer and what
            makes a step; asked before the first step only.

    Returns:
        The model as accelerate wrapped it, and what to report: steps, tokens, losses, curve, speed, memory.

    Raises:
        Interrupted: after SIGINT or SIGTERM; the state is saved first. A second signal ends the program at once.
        Diverged: the loss or a weight is not finite. The newest state is from before.
        OSError: a state could not be written; the one before is kept.
    """
    groups = parameter_groups(model, arguments.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=arguments.learning_rate, betas=(0.9, 0.95))
    schedule = get_scheduler(
        arguments.schedule,
        optimizer,
        num_warmup_steps=min(arguments.warmup_steps, arguments.steps),
        num_training_steps=arguments.steps,
        scheduler_specific_kwargs=(
            {"num_decay_steps": max(1, arguments.steps // 5)} if arguments.schedule == "warmup_stable_decay" else None
        ),
    )
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    recovery = Recovery(model, teacher, arguments, trained_length) if teacher is not None else None
    if accelerator.distributed_type == "DEEPSPEED":  # there is no DataLoader it could read this from
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = plan[-1].rows
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    sharing = Sharing.of(accelerator, arguments)
    if arguments.tracker != "none":
        flat = {key: value for key, value in vars(arguments).items() if isinstance(value, (int, float, str, bool))}
        accelerator.init_trackers("hf_posenc", flat)
    progress = Progress()
    accelerator.register_for_checkpointing(progress, schedule)
    if resume and (state := newest_state(folder)):
        accelerator.load_state(state)
        accelerator.print(f"Resumed after step {progress.step}, from {state}")
    if find_rate is not None and progress.step == 0:

        def attempt(step: int) -> float:
            return one_step(accelerator, wrapped, optimizer, plan[0], step, arguments, recovery, sharing)

        set_rate(optimizer, schedule, find_rate(wrapped, optimizer, attempt))

    def diverged(what: str, step: int) -> Diverged:
        state = newest_state(folder)
        return Diverged(
            f"{what} at step {step}: try a lower --learning-rate or more --warmup-steps"
            + (f"; {state} is from before" if state else "")
        )

    def keep() -> Path:
        if not all_finite(accelerator, wrapped):
            raise diverged("the weights are no numbers any more", progress.step)
        return save_state(accelerator, folder, progress.step)

    def measured(step: int) -> None:
        assert evaluate is not None
        found = evaluate(wrapped)
        progress.curve.append({"tokens": progress.tokens, "loss": found})
        accelerator.log({"held_out_loss": found}, step=step)

    wrapped.train()
    start = time.perf_counter() - progress.seconds
    with (
        StopRequest() as stop,
        tqdm(
            total=arguments.steps,
            initial=progress.step,
            desc="fine-tuning",
            unit="step",
            disable=not accelerator.is_main_process,
        ) as bar,
    ):
        for phase in plan:
            for step in range(max(progress.step, phase.first_step), phase.first_step + phase.steps):
                if evaluate and arguments.eval_every and step % arguments.eval_every == 0:
                    measured(step)
                    wrapped.train()
                loss = one_step(accelerator, wrapped, optimizer, phase, step, arguments, recovery, sharing)
                schedule.step()
                if not math.isfinite(loss):
                    raise diverged(f"the loss became {loss}", step + 1)
                progress.step = step + 1
                progress.tokens += tokens_per_step(phase, arguments, accelerator)
                progress.losses.append(loss)
                progress.seconds = time.perf_counter() - start
                bar.set_postfix(
                    loss=f"{loss:.3f}",
                    tokens_per_s=f"{progress.tokens / progress.seconds:,.0f}",
                    memory=f"{peak_memory(accelerator) / 2**30:.1f} GiB",
                    refresh=False,
                )
                bar.update()
                accelerator.log({"loss": loss, "learning_rate": schedule.get_last_lr()[0]}, step=progress.step)
                signum = stop.agreed(accelerator)
                if signum or (arguments.save_every and progress.step % arguments.save_every == 0):
                    saved = keep()
                    if signum:
                        raise Interrupted(signum, saved)
    if newest_state(folder) != folder / state_name(progress.step):
        keep()  # what comes now takes long too, and may be interrupted
    if evaluate and arguments.eval_every:
        measured(progress.step)
    wrapped.eval()
    for tracker in accelerator.trackers:  # not end_training, which ends the process group as well
        tracker.finish()
    return wrapped, {
        "steps": arguments.steps,
        "tokens": progress.tokens,
        "passes_over_the_text": progress.tokens / plan[-1].windows.total,
        "seconds": round(progress.seconds, 1),
        "tokens_per_second": round(progress.tokens / progress.seconds, 1),
        "peak_memory_bytes": peak_memory(accelerator),
        "loss": progress.losses,
        "curve": progress.curve,
    }


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained weights for an optimizer: matrices with weight decay; vectors and position parameters without.

    Position parameters are those of a scheme, wherever in the model it keeps them, and a base's own table of positions.
    """
    positions = {id(weight) for module in position_modules(model) for weight in module.parameters()}
    trained = [weight for weight in model.parameters() if weight.requires_grad]  # LoRA trains few of them
    decayed = [weight for weight in trained if weight.dim() > 1 and id(weight) not in positions]
    known = {id(weight) for weight in decayed}
    others = [weight for weight in trained if id(weight) not in known]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def set_rate(optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LambdaLR, rate: float) -> None:
    """Gives a schedule that has not begun another peak."""
    schedule.base_lrs = [rate] * len(schedule.base_lrs)
    for group, factor in zip(optimizer.param_groups, schedule.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = rate, rate * factor(0)


def position_modules(model: nn.Module) -> Iterator[nn.Module]:
    """What holds position parameters: modules of schemes and, of an unpatched model, its own table."""
    yield from (module for module in model.modules() if isinstance(module, PositionModule))
    if (table := position_table(model)) is not None:
        yield table


@dataclass
class Sharing:
    """Which windows a process takes, and with whom it shares each of them."""

    group: Any  # of the processes that share a sequence; None where each has its own
    rank: int  # number of the group
    size: int  # number of groups

    @classmethod
    def of(cls, accelerator: Accelerator, arguments: TrainingArguments) -> "Sharing":
        """Groups of `--context-parallel` processes."""
        if arguments.context_parallel == 1:
            return cls(None, accelerator.process_index, accelerator.num_processes)
        return cls(*hf_posenc.context_group(arguments.context_parallel))

    def part(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This process's part of a batch."""
        if self.group is None:
            return batch
        batch = {**batch, "shift_labels": batch["targets"]}
        del batch["targets"]
        shard = hf_posenc.shard_sequence(batch, self.group)
        shard["targets"] = shard.pop("shift_labels")
        return {name: tensor for name, tensor in shard.items() if name not in ("labels", "num_items_in_batch")}

    def inside(self, wrapped: nn.Module) -> AbstractContextManager:
        """Around forward and backward."""
        return nullcontext() if self.group is None else hf_posenc.context_parallel(wrapped, self.group)


def one_step(
    accelerator: Accelerator,
    wrapped: nn.Module,
    optimizer: torch.optim.Optimizer,
    phase: Phase,
    step: int,
    arguments: TrainingArguments,
    recovery: Recovery | None,
    sharing: Sharing,
) -> float:
    """One optimizer step; returns the mean loss of the text's tokens, over all processes."""
    forwards, processes = arguments.gradient_accumulation, accelerator.num_processes
    per_forward = phase.rows * sharing.size
    first = (step - phase.first_step) * forwards * per_forward
    chosen = order(phase.seed, len(phase.windows), first, first + forwards * per_forward)
    batches = [
        sharing.part(phase.windows.batch(chosen[start : start + phase.rows]))
        for start in range(sharing.rank * phase.rows, len(chosen), per_forward)
    ]
    # A packed window has fewer targets than another: the mean is over the step's tokens, however they are dealt out.
    counts = sum((batch["targets"] != IGNORED).sum() for batch in batches).float().to(accelerator.device)
    total = max(accelerator.reduce(counts, "sum").item(), 1)  # of chats a step may hold nothing that the assistant says
    summed = torch.zeros((), device=accelerator.device)
    for batch in batches:
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        targets = batch.pop("targets")
        with accelerator.accumulate(wrapped), sharing.inside(wrapped):
            if recovery is not None:
                loss, own = recovery.loss(wrapped, batch, targets, step)
            else:
                loss = own = token_loss(wrapped(**batch, use_cache=False).logits, targets)
            # accelerate divides by the forwards, and its gradients are means over the processes.
            accelerator.backward(loss * (forwards * processes / total))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), arguments.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        summed += own.detach()
    return accelerator.reduce(summed, "sum").item() / total


def all_finite(accelerator: Accelerator, model: nn.Module) -> bool:
    """Return whether every weight on every process is a finite number."""
    wrong = torch.zeros((), device=accelerator.device)
    for weight in model.parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        wrong += (~local.detach().isfinite()).sum()
    return accelerator.reduce(wrong, "sum").item() == 0


def tokens_per_step(phase: Phase, arguments: TrainingArguments, accelerator: Accelerator) -> int:
    """Tokens of all processes in one optimizer step."""
    groups = accelerator.num_processes // arguments.context_parallel
    return phase.rows * phase.length * arguments.gradient_accumulation * groups


def peak_memory(accelerator: Accelerator) -> int:
    """Most bytes this process ever held: on its GPU, or in main memory."""
    if accelerator.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --------------------------------------------------------------------------------------------------------------- states


def save_state(accelerator: Accelerator, folder: Path, step: int) -> Path:
    """Everything to go on from, whole or not at all; the states before are removed once it is there."""
    state, partial = folder / state_name(step), folder / "state.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    logging.getLogger("accelerate.utils.other").addFilter(_is_no_tie)
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        older = states(folder)
        if state not in older:
            os.rename(partial, state)
        for folder in older:
            if folder != state:
                shutil.rmtree(folder)
    accelerator.wait_for_everyone()
    return state


def _is_no_tie(record: logging.LogRecord) -> bool:
    """False for what accelerate says where tied weights are saved once: they are read into a model that ties them."""
    return "Removed shared tensor" not in record.getMessage()


def state_name(step: int) -> str:
    """Folder of the state after so many steps."""
    return f"state-{step:06d}"


def states(folder: Path) -> list[Path]:
    """The complete states, oldest first."""
    return sorted(path for path in folder.glob("state-*") if re.fullmatch(r"state-\d{6,}", path.name))


def newest_state(folder: Path) -> Path | None:
    """The state to go on from."""
    return states(folder)[-1] if states(folder) else None


class StopRequest:
    """Inside, a first SIGINT or SIGTERM is noted; a second one does what it always did."""

    def __enter__(self) -> "StopRequest":
        self.received = 0
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, number: int, _: Any) -> None:
        """The handler."""
        self.received = number
        print("\nStopping after this step; the state is saved first. Once more to stop at once.", file=sys.stderr)
        self.restore()

    def agreed(self, accelerator: Accelerator) -> int:
        """The signal that any process got, known to all of them; 0 for none."""
        if accelerator.num_processes == 1:
            return self.received
        return int(accelerator.gather(torch.tensor([self.received], device=accelerator.device)).max())

    def restore(self) -> None:
        """The handlers from before."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        self.restore()
