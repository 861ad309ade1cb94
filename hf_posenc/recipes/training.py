"""The fine-tuning loop of the recipes, on one process or many.

transformers' Trainer lacks three things that the recipes need: phases of different context lengths, a teacher, and
processes that share a sequence. The order of the windows does not depend on the number of processes.
"""

import copy
import logging
import math
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

import hf_posenc

from ..core.modules import PositionModule
from ..model.logits import IGNORED
from .corpus import Document, Windows, order
from .models import position_table
from .options import Count, Length, Natural, Positive, UsageError
from .training_positions import SkippedPositions

WEIGHT_DECAY = 0.01
"""Weight decay of matrices; vectors and position parameters get none."""
PARTIAL = "half-written-state"
"""Folder in which a state is written, before it is renamed."""
MAX_GRAD_NORM = 1.0
"""Norm to which gradients are clipped."""


@dataclass(kw_only=True)
class TrainingArguments:
    """Training.

    Args:
        train_length: context length to train at, in tokens.
        steps: optimizer steps.
        batch_size: sequences of --train-length per forward pass and process; more of them if they are shorter, so that
            the number of tokens is the same.
        gradient_accumulation: forward passes per optimizer step.
        learning_rate: peak, after warm-up and before the cosine decay; in recipes that calibrate by default 3e-4, or
            1e-3 with --calibrate none.
        warmup_steps: steps of linear warm-up; at most all of --steps.
        mixed_precision: number format of the computation; by default the choice of `accelerate launch`.
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.
        context_parallel: number of processes that share a sequence, for contexts that do not fit on one device.
        eval_every: steps between points of the recovery curve (held-out loss); 0 draws none.
        save_every: steps between saved states, from which --resume goes on; 0 saves only when interrupted.
        tracker: service that loss and learning rate are also sent to.
        pose_length: number of positions that windows visit, more than --train-length: each is cut in two, and skips
            some between its parts (PoSE). So short windows meet the distances of long ones. Steps of the recovery,
            and measurements, skip none.
    """

    train_length: Length = 1024
    steps: Count = 150
    batch_size: Count = 1
    gradient_accumulation: Count = 2
    learning_rate: Positive | None = None
    warmup_steps: Natural = 10
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    gradient_checkpointing: bool = False
    context_parallel: Count = 1
    eval_every: Natural = 0
    save_every: Natural = 0
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    pose_length: Length | None = None

    @property
    def tokens_to_read(self) -> int:
        """Number of tokens that one process trains on."""
        return self.steps * self.batch_size * self.train_length * self.gradient_accumulation


def accelerator_for(arguments: TrainingArguments, folder: Path) -> Accelerator:
    """Return an accelerator with the arguments' precision, accumulation and tracker.

    Raises:
        UsageError: if accelerate did not join the processes that were started, so that each would train by itself; if
            `context_parallel` does not divide their number.
    """
    accelerator = Accelerator(
        # Without a GPU accelerate joins several processes only with cpu=True, unless they are DeepSpeed's.
        cpu=not torch.accelerator.is_available() and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true",
        mixed_precision=arguments.mixed_precision,
        # By default the end of a pass over the data ends an accumulation. Our windows have no end.
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


# --------------------------------------------------------------------------------------------------------------- phases


@dataclass
class Phase:
    """Training steps at one context length.

    Attributes:
        windows: windows of the training text.
        steps: number of optimizer steps.
        first_step: index of the first step in the run.
        rows: sequences per forward pass.
        forwards: forward passes per step and process.
        groups: number of processes, or of the groups that share a sequence.
        seed: seed of the order of the windows.
        positions: the positions of the windows; None for those without skips.
    """

    windows: Windows
    steps: int
    first_step: int
    rows: int
    forwards: int
    groups: int
    seed: int
    positions: SkippedPositions | None = None

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in one optimizer step, of all processes."""
        return self.rows * self.windows.length * self.forwards * self.groups

    def batch(self, indices: list[int], first: int) -> dict[str, Tensor]:
        """Return windows as in `Windows.batch`, with the phase's positions; `first` is the first one's number."""
        batch = self.windows.batch(indices)
        if self.positions is not None:
            batch |= self.positions.inputs(range(first, first + len(indices)), self.windows.length)
        return batch


def phases(
    arguments: TrainingArguments,
    documents: list[Document],
    accelerator: Accelerator,
    *,
    packing: str,
    seed: int,
    recovery_steps: int = 0,
    recovery_length: int = 0,
) -> list[Phase]:
    """Return the phases of a run: recovery at a short length, then the rest at the train length.

    Steps of both phases have about the same number of tokens.

    Raises:
        UsageError: if the training text is too short for one batch of every phase.
    """
    plan: list[Phase] = []
    groups = accelerator.num_processes // arguments.context_parallel
    spans = ((recovery_length, 0, recovery_steps), (arguments.train_length, recovery_steps, arguments.steps))
    for length, first, last in spans:
        if last > first:
            rows = max(1, arguments.batch_size * arguments.train_length // length)
            windows = Windows(documents, length, packing)
            plan.append(Phase(windows, last - first, first, rows, arguments.gradient_accumulation, groups, seed))
    if arguments.pose_length is not None:
        plan[-1].positions = SkippedPositions(arguments.pose_length, seed)
    for phase in plan:
        needed, length = phase.rows * accelerator.num_processes, phase.windows.length
        if len(phase.windows) < needed:
            raise UsageError(
                f"the training text has {phase.windows.total:,} tokens, one batch needs {needed * length:,} "
                f"({accelerator.num_processes} x {phase.rows} x {length}): give more text, a shorter --train-length or "
                "a smaller --batch-size"
            )
    return plan


@dataclass(frozen=True)
class Teacher:
    """The unpatched base, whose predictions win back the loss that a swap of positions costs.

    Attributes:
        model: frozen copy of the stock model, in eval mode.
        weight: weight of the divergence from its predictions.
        trained_length: context length that it was trained at. It reads only so many tokens of a sequence.
    """

    model: nn.Module
    weight: float
    trained_length: int

    @classmethod
    def of(cls, model: nn.Module, weight: float, trained_length: int, *, share_weights: bool) -> "Teacher":
        """Copy a stock model before it is patched. With LoRA its weights are shared, because they are not trained."""
        memo = {id(parameter): parameter for parameter in model.parameters()} if share_weights else {}
        teacher = copy.deepcopy(model, memo).eval()
        return cls(teacher if share_weights else teacher.requires_grad_(False), weight, trained_length)

    def divergence(self, logits: Tensor, batch: dict[str, Tensor], targets: Tensor) -> Tensor:
        """Return the weighted KL divergence from the teacher's predictions, summed over the targets, in nats.

        Args:
            logits: (B, T, V) logits of the model.
            batch: `input_ids` `(B, T)` and, for packed documents, `position_ids`.
            targets: `(B, T)`, IGNORED where nothing is predicted.
        """
        length = self.trained_length
        with torch.no_grad():
            read = {name: tensor[:, :length] for name, tensor in batch.items()}
            target = self.model(**read, use_cache=False).logits.float().log_softmax(-1)
        predicted = logits[:, :length].float().log_softmax(-1)
        divergence = F.kl_div(predicted, target, log_target=True, reduction="none").sum(-1)
        return self.weight * divergence[targets[:, :length] != IGNORED].sum()


# ------------------------------------------------------------------------------------------------------------- the loop

Group = tuple[torch.distributed.ProcessGroup | None, int]
"""The processes that share a sequence with this one, if any, and the index of their group."""


@dataclass
class Progress:
    """Counters and curves of a training run, saved beside weights, optimizer, schedule and random generators."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Return the values; accelerate's save_state calls this."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the values; accelerate's load_state calls this."""
        vars(self).update(state)


class Interrupted(Exception):
    """A signal stopped the run, whose state is saved in `folder`. `status` is the exit status a shell expects."""

    def __init__(self, signum: int, folder: Path):
        """Keep the exit status of a signal."""
        super().__init__(f"stopped by {signal.Signals(signum).name}; the state is in {folder}")
        self.status = 128 + signum


class Diverged(Exception):
    """The loss or a weight is no longer finite."""


def fine_tune(
    accelerator: Accelerator,
    model: PreTrainedModel,
    plan: list[Phase],
    arguments: TrainingArguments,
    folder: Path,
    *,
    teacher: Teacher | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Fine-tune a model in place. If the folder has a state, the training goes on from the newest one.

    Args:
        accelerator: from `accelerator_for`.
        model: the patched model, on the device, not wrapped.
        plan: from `phases`.
        arguments: options of the training, with a learning rate.
        folder: folder for states, `folder/state-000100` and so on. Only the newest is kept. The caller removes it once
            the results are written.
        teacher: the teacher; None trains on the text alone.
        evaluate: function that returns the held-out loss of the model, for the recovery curve of `--eval-every`.

    Returns:
        The model as accelerate wrapped it, and the results: steps, tokens, losses, curve, speed, memory.

    Raises:
        Interrupted: after SIGINT or SIGTERM, once the state is saved. A second signal ends the program at once.
        Diverged: the loss or a weight is not finite. The newest state was saved before that.
        OSError: a state could not be written; the state before it is kept.
    """
    assert arguments.learning_rate is not None  # recipes set its default
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=arguments.learning_rate, betas=(0.9, 0.95))
    warmup_steps = min(arguments.warmup_steps, arguments.steps)
    schedule = get_cosine_schedule_with_warmup(optimizer, warmup_steps, arguments.steps)
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if accelerator.distributed_type == "DEEPSPEED":  # DeepSpeed would read it from a DataLoader
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = plan[-1].rows
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    group: Group = (None, accelerator.process_index)
    if arguments.context_parallel > 1:
        group = hf_posenc.context_group(arguments.context_parallel)[:2]
    if arguments.tracker != "none":
        accelerator.init_trackers("hf_posenc")
    progress = Progress()
    accelerator.register_for_checkpointing(progress, schedule)
    if state := newest_state(folder):
        accelerator.load_state(state)
        accelerator.print(f"Resumed after step {progress.step}, from {state}")

    def add_curve_point() -> None:
        if evaluate is not None and arguments.eval_every:
            progress.curve.append({"tokens": progress.tokens, "loss": evaluate(wrapped)})
            accelerator.log({"held_out_loss": progress.curve[-1]["loss"]}, step=progress.step)
        wrapped.train()

    def require_finite(finite: bool, what: str, step: int) -> None:
        if not finite:
            state = newest_state(folder)
            raise Diverged(
                f"{what} at step {step}: try a lower --learning-rate or more --warmup-steps"
                + (f"; {state} is from before" if state else "")
            )

    def save() -> Path:
        require_finite(all_finite(accelerator, wrapped), "the weights are no numbers any more", progress.step)
        return save_state(accelerator, folder, progress.step)

    start = time.perf_counter() - progress.seconds
    wrapped.train()
    bar = tqdm(
        total=arguments.steps, initial=progress.step, desc="fine-tuning", disable=not accelerator.is_main_process
    )
    with stop_signals() as received, bar:
        for phase in plan:
            for step in range(max(progress.step, phase.first_step), phase.first_step + phase.steps):
                if arguments.eval_every and step % arguments.eval_every == 0:
                    add_curve_point()
                loss = one_step(accelerator, wrapped, optimizer, phase, step, teacher, group)
                schedule.step()
                require_finite(math.isfinite(loss), f"the loss became {loss}", step + 1)
                progress.step = step + 1
                progress.tokens += phase.tokens_per_step
                progress.losses.append(loss)
                progress.seconds = time.perf_counter() - start
                accelerator.log({"loss": loss, "learning_rate": schedule.get_last_lr()[0]}, step=progress.step)
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update()
                # All processes stop together.
                signals = accelerator.gather(torch.tensor([sum(received)], device=accelerator.device))
                if signum := int(signals.max()):
                    raise Interrupted(signum, save())
                if arguments.save_every and progress.step % arguments.save_every == 0:
                    save()
    save()  # the measurements that follow take long, and may be interrupted
    add_curve_point()
    wrapped.eval()
    for tracker in accelerator.trackers:  # accelerator.end_training would end the process group as well
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


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the trained weights for an optimizer. Only matrices get weight decay, and no position parameters.

    Position parameters belong to a scheme, wherever in the model it keeps them, or to a base's table of positions.
    """
    holders: list[nn.Module] = [module for module in model.modules() if isinstance(module, PositionModule)]
    if (table := position_table(model)) is not None:
        holders.append(table)
    positions = {id(weight) for module in holders for weight in module.parameters()}
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for weight in model.parameters():
        if weight.requires_grad:  # with LoRA only a few
            (decayed if weight.dim() > 1 and id(weight) not in positions else others).append(weight)
    return [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


def one_step(
    accelerator: Accelerator,
    wrapped: nn.Module,
    optimizer: AcceleratedOptimizer,
    phase: Phase,
    step: int,
    teacher: Teacher | None,
    group: Group,
) -> float:
    """Make one optimizer step; return the mean loss per target on the text, over all processes."""
    sharing, rank = group
    per_forward = phase.rows * phase.groups
    first = (step - phase.first_step) * phase.forwards * per_forward
    indices = order(phase.seed, len(phase.windows), first, first + phase.forwards * per_forward)
    batches = [
        phase.batch(indices[start : start + phase.rows], first + start)
        for start in range(rank * phase.rows, len(indices), per_forward)
    ]
    if sharing is not None:
        batches = [shard(batch, sharing) for batch in batches]
    # Windows differ in their number of targets. The mean is over the targets of the step, on whatever process they are.
    local_targets = torch.stack([(batch["targets"] != IGNORED).sum() for batch in batches]).sum().float()
    # Packed documents of one token have none.
    num_targets = max(accelerator.reduce(local_targets.to(accelerator.device), "sum").item(), 1)
    loss_sum = torch.zeros((), device=accelerator.device)
    for batch in batches:
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        targets = batch.pop("targets")
        shared = nullcontext() if sharing is None else hf_posenc.context_parallel(wrapped, sharing)
        with accelerator.accumulate(wrapped), shared:
            logits = wrapped(**batch, use_cache=False).logits
            loss = text_loss = token_loss(logits, targets)
            if teacher is not None:
                loss = text_loss + teacher.divergence(logits, batch, targets)
            # accelerate divides the loss by the number of forward passes, and averages gradients over the processes.
            accelerator.backward(loss * (phase.forwards * accelerator.num_processes / num_targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
        loss_sum += text_loss.detach()
    return accelerator.reduce(loss_sum, "sum").item() / num_targets


def shard(batch: dict[str, Tensor], group: torch.distributed.ProcessGroup) -> dict[str, Tensor]:
    """Return the shard of a batch that this process computes."""
    batch = {name.replace("targets", "shift_labels"): tensor for name, tensor in batch.items()}
    sharded = hf_posenc.shard_sequence(batch, group)
    sharded["targets"] = sharded.pop("shift_labels")
    return {name: tensor for name, tensor in sharded.items() if name not in ("labels", "num_items_in_batch")}


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the negative log-likelihoods of all targets, in nats, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def all_finite(accelerator: Accelerator, model: nn.Module) -> bool:
    """Return whether every weight on every process is a finite number."""
    not_finite = torch.zeros((), device=accelerator.device)
    for weight in model.parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        not_finite += (~local.detach().isfinite()).sum()
    return accelerator.reduce(not_finite, "sum").item() == 0


def peak_memory(accelerator: Accelerator) -> int:
    """Return the peak memory of this process in bytes, on its GPU or, without one, in main memory."""
    if accelerator.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --------------------------------------------------------------------------------------------------------------- states


def save_state(accelerator: Accelerator, folder: Path, step: int) -> Path:
    """Save everything that `--resume` needs, all files or none. Then remove older states."""
    state, partial = folder / f"state-{step:06d}", folder / PARTIAL
    if state.is_dir():  # saved already, by this run
        return state
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)  # which a kill left
    accelerator.wait_for_everyone()
    # accelerate warns that tied weights are saved once. Loading ties them again.
    logging.getLogger("accelerate.utils.other").addFilter(_is_not_about_ties)
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        partial.rename(state)
        discard_states(folder, but=state)
    accelerator.wait_for_everyone()
    return state


def _is_not_about_ties(record: logging.LogRecord) -> bool:
    return "Removed shared tensor" not in record.getMessage()


def discard_states(folder: Path, but: Path | None = None) -> None:
    """Remove all states of a folder except `but`."""
    for path in {*states(folder), folder / PARTIAL} - {but}:
        shutil.rmtree(path, ignore_errors=True)


def states(folder: Path) -> list[Path]:
    """Return the complete states in a folder, oldest first."""
    return sorted(folder.glob("state-*"))


def newest_state(folder: Path) -> Path | None:
    """Return the state to go on from, or None if there is none."""
    return next(reversed(states(folder)), None)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Context manager with a list that gets the first SIGINT or SIGTERM. A second signal has its usual effect."""
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def note(number: int, _: object) -> None:
        received.append(number)
        print("\nStopping after this step; the state is saved first. A second signal stops at once.", file=sys.stderr)
        restore()

    for number in handlers:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
