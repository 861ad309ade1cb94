"""The fine-tuning loop of the recipes, on one process or many.

transformers' Trainer lacks three things that the recipes need: phases of different context lengths, a teacher, and
processes that share a sequence. The order of the windows does not depend on the number of processes.
"""

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
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import GradientAccumulationPlugin, broadcast_object_list
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, get_scheduler

import hf_posenc

from ..checkpoints import files
from ..modules import PositionModule
from . import long_context_loss, training_positions
from .corpus import IGNORED, Document, Windows, order
from .distillation import Distillation, token_loss
from .long_context_loss import LongCE, ObjectiveArguments
from .models import position_table
from .options import Count, Length, Natural, NotNegative, Options, Positive, UsageError
from .results import Results
from .training_positions import ChosenPositions, PositionArguments

SCHEDULES = ("cosine", "linear", "constant_with_warmup", "warmup_stable_decay")
TRACKERS = ("none", "tensorboard", "wandb", "trackio")
TRIAL_STEPS = 10
"""Optimizer steps at each learning rate that is tried."""
FindRate = Callable[[nn.Module, AcceleratedOptimizer, Callable[[int], float]], float]
"""Function that chooses a learning rate. Its arguments: the wrapped model, its optimizer, and a function that makes the
training step with a given number."""


@dataclass
class TrainingArguments(PositionArguments, ObjectiveArguments):
    """Training.

    Args:
        train_length: context length to train at, in tokens.
        steps: optimizer steps.
        batch_size: sequences of --train-length per forward pass and process; more of them if they are shorter, so that
            the number of tokens is the same.
        gradient_accumulation: forward passes per optimizer step.
        learning_rate: peak, after warm-up and before the decay; in recipes that calibrate by default 3e-4, or 1e-3 with
            --calibrate none.
        schedule: course of the learning rate after warm-up.
        warmup_steps: steps of linear warm-up; at most all of --steps.
        weight_decay: weight decay of matrices; vectors and position parameters get none.
        max_grad_norm: gradients are clipped to this norm.
        mixed_precision: number format of the computation; by default the choice of `accelerate launch`.
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.
        context_parallel: number of processes that share a sequence, for contexts that do not fit on one device.
        eval_every: steps between points of the recovery curve (held-out loss); 0 draws none.
        save_every: steps between saved states, from which --resume goes on; 0 saves only when interrupted.
        tracker: service that loss and learning rate are also sent to.
        split_seed: seed of the choice of held-out documents; runs with different --seed share it, so that they compare.
    """

    train_length: Length = 1024
    steps: Count = 150
    batch_size: Count = 1
    gradient_accumulation: Count = 2
    learning_rate: Positive | None = None
    schedule: Annotated[str, SCHEDULES] = "cosine"
    warmup_steps: Natural = 10
    weight_decay: NotNegative = 0.01
    max_grad_norm: Positive = 1.0
    mixed_precision: Annotated[str, ("no", "bf16", "fp16")] | None = None
    gradient_checkpointing: bool = False
    context_parallel: Count = 1
    eval_every: Natural = 0
    save_every: Natural = 0
    tracker: Annotated[str, TRACKERS] = "none"
    split_seed: int = 0

    @property
    def tokens_to_read(self) -> int:
        """Number of tokens that one process trains on."""
        return self.steps * self.batch_size * self.train_length * self.gradient_accumulation


@dataclass
class RateArguments(Options):
    """Finding a learning rate.

    Args:
        find_learning_rate: rates to try for 10 steps each, all from the same start. The rate with the lowest loss on
            training text set aside for this becomes --learning-rate.
    """

    find_learning_rate: list[float] = field(default_factory=list)


@dataclass
class RecoveryArguments(Options):
    """Winning back the loss that the swap costs.

    Args:
        recovery_steps: number of steps, the first of --steps, that run at --recovery-length: short windows win the loss
            back more cheaply (default: half of --steps if --train-length exceeds the length the base was trained at, or
            with --recovery-length; else 0).
        recovery_length: context length of the recovery steps; by default the length the base was trained at, at most
            --train-length.
        distill: weight of the KL divergence from the predictions of the unpatched base, within the length it was
            trained at. It is added to the loss on the text; 0 turns it off.
    """

    recovery_steps: Natural | None = None
    recovery_length: Length | None = None
    distill: NotNegative = 0.0


@dataclass
class FineTuningArguments(TrainingArguments, RateArguments, RecoveryArguments):
    """Training that begins with a patched base."""


def check(arguments: TrainingArguments, packing: str) -> None:
    """Raise UsageError for options that contradict each other, and for a tracker that is not installed.

    Without a tracker accelerate would go on.
    """
    training_positions.check(arguments, arguments.train_length, packing)
    if arguments.positions != training_positions.PLAIN and arguments.context_parallel > 1:
        raise UsageError(
            f"--context-parallel cannot be combined with --positions {arguments.positions}: a shared sequence takes no "
            "skipped positions"
        )
    long_context_loss.check(arguments, arguments.train_length, arguments.context_parallel)
    if arguments.tracker != "none" and importlib.util.find_spec(arguments.tracker) is None:
        raise UsageError(f"--tracker {arguments.tracker}: pip install {arguments.tracker}")


def check_recovery(arguments: FineTuningArguments) -> None:
    """Raise UsageError for options of the recovery that contradict options of the training."""
    steps, length = arguments.recovery_steps, arguments.recovery_length
    if (steps or 0) > arguments.steps:
        raise UsageError(f"--recovery-steps {steps} are the first of all --steps {arguments.steps}, not more")
    if length is not None and steps == 0:
        raise UsageError(f"--recovery-length {length} has no effect with --recovery-steps 0: leave it out")
    if steps == arguments.steps and arguments.positions != training_positions.PLAIN:
        raise UsageError(f"--positions {arguments.positions} has no effect: all --steps are --recovery-steps")
    if length is not None and length > arguments.train_length:
        raise UsageError(f"--recovery-length {length} is beyond --train-length {arguments.train_length}")


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


@dataclass
class Phase:
    """Training steps at one context length.

    Attributes:
        windows: windows of the training text.
        steps: number of optimizer steps.
        first_step: index of the first step in the run.
        rows: sequences per forward pass and process.
        seed: seed of the order of the windows.
        positions: the positions of the windows; None for plain ones.
    """

    windows: Windows
    steps: int
    first_step: int
    rows: int
    seed: int
    positions: ChosenPositions | None = None

    @property
    def length(self) -> int:
        """Tokens in a sequence."""
        return self.windows.length

    def batch(self, indices: list[int], first: int) -> dict[str, Tensor]:
        """Return windows as in `Windows.batch`, with the phase's positions; `first` is the first one's number."""
        batch = self.windows.batch(indices)
        if self.positions is not None:
            batch |= self.positions.inputs(range(first, first + len(indices)), self.length)
        return batch


def phases(
    arguments: FineTuningArguments, documents: list[Document], trained_length: int, *, packing: str, seed: int
) -> list[Phase]:
    """Return the phases of a run: recovery at a short length, then the rest at the train length.

    Args:
        arguments: checked options, `recovery_steps` set.
        documents: documents to train on.
        trained_length: context length that the base was trained at.
        packing: see `Windows`.
        seed: seed of the order of the windows.

    Returns:
        The phases that have steps. Steps of both phases have about the same number of tokens.
    """
    recovery_length = min(arguments.recovery_length or trained_length, arguments.train_length)
    recovery_steps = arguments.recovery_steps or 0
    plan, first_step = [], 0
    train_steps = arguments.steps - recovery_steps
    for length, steps in ((recovery_length, recovery_steps), (arguments.train_length, train_steps)):
        if steps:
            rows = max(1, arguments.batch_size * arguments.train_length // length)
            plan.append(Phase(Windows(documents, length, packing), steps, first_step, rows, seed))
            first_step += steps
    if train_steps:
        plan[-1].positions = ChosenPositions.of(arguments, seed)
    return plan


def check_plan(plan: list[Phase], accelerator: Accelerator) -> None:
    """Raise UsageError if the training text is too short for one batch of every phase."""
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
    """Counters and curves of a training run, saved beside weights, optimizer, schedule and random generators."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)

    def state_dict(self) -> Results:
        """Return the values; accelerate's save_state calls this."""
        return dict(vars(self))

    def load_state_dict(self, state: Results) -> None:
        """Set the values; accelerate's load_state calls this."""
        vars(self).update(state)


class Interrupted(Exception):
    """A signal stopped the run, whose state is saved in `folder`. `status` is the exit status a shell expects."""

    def __init__(self, signum: int, folder: Path):
        """Keep the exit status of a signal and the folder of the state."""
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.status, self.folder = 128 + signum, folder


class Diverged(Exception):
    """The loss or a weight is no longer finite."""


def fine_tune(
    accelerator: Accelerator,
    model: PreTrainedModel,
    plan: list[Phase],
    arguments: TrainingArguments,
    *,
    folder: Path,
    resume: bool = False,
    distillation: Distillation | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    find_rate: FindRate | None = None,
) -> tuple[nn.Module, Results]:
    """Fine-tune a model in place.

    Args:
        accelerator: from `accelerator_for`.
        model: the patched model, on the device, not wrapped.
        plan: from `phases`.
        arguments: learning rate, schedule and the other options of the training.
        folder: folder for states, `folder/state-000100` and so on. Only the newest is kept. The caller removes it once
            the results are written.
        resume: go on from the newest state, if there is one.
        distillation: the loss with a teacher; None trains on the text alone, with the loss of `--objective`.
        evaluate: function that returns the held-out loss of the model, for the recovery curve.
        find_rate: function that returns a learning rate to use instead of `arguments.learning_rate`. It is called once,
            before the first step.

    Returns:
        The model as accelerate wrapped it, and the results: steps, tokens, losses, curve, speed, memory.

    Raises:
        Interrupted: after SIGINT or SIGTERM, once the state is saved. A second signal ends the program at once.
        Diverged: the loss or a weight is not finite. The newest state was saved before that.
        OSError: a state could not be written; the state before it is kept.
    """
    objective = distillation or LongCE.of(arguments, arguments.train_length)
    run = FineTuning(accelerator, model, plan, arguments, folder, objective)
    if resume:
        run.resume()
    if find_rate is not None and run.progress.step == 0:
        run.set_rate(find_rate(run.wrapped, run.optimizer, lambda step: run.step(plan[0], step)))
    run.train(evaluate if arguments.eval_every else None)
    return run.wrapped, run.report()


@dataclass(eq=False)
class FineTuning:
    """A model in training: the wrapped model, its optimizer, its schedule, and its progress."""

    accelerator: Accelerator
    model: PreTrainedModel
    plan: list[Phase]
    arguments: TrainingArguments
    folder: Path
    objective: Distillation | LongCE | None

    def __post_init__(self) -> None:
        """Make the optimizer and its schedule, and let accelerate wrap the model: see `fine_tune`."""
        accelerator, model, arguments = self.accelerator, self.model, self.arguments
        optimizer = torch.optim.AdamW(
            parameter_groups(model, arguments.weight_decay),
            lr=cast(float, arguments.learning_rate),  # recipes set its default
            betas=(0.9, 0.95),
        )
        decay_steps = {"num_decay_steps": max(1, arguments.steps // 5)}
        self.schedule = get_scheduler(
            arguments.schedule,
            optimizer,
            num_warmup_steps=min(arguments.warmup_steps, arguments.steps),
            num_training_steps=arguments.steps,
            scheduler_specific_kwargs=decay_steps if arguments.schedule == "warmup_stable_decay" else None,
        )
        if arguments.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if accelerator.distributed_type == "DEEPSPEED":  # DeepSpeed would read it from a DataLoader
            accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = self.plan[-1].rows
        self.wrapped, self.optimizer = accelerator.prepare(model, optimizer)
        self.sharing = Sharing.of(accelerator, arguments)
        if arguments.tracker != "none":
            scalars = {key: value for key, value in vars(arguments).items() if isinstance(value, int | float | str)}
            accelerator.init_trackers("hf_posenc", scalars)
        self.progress = Progress()
        accelerator.register_for_checkpointing(self.progress, self.schedule)

    def resume(self) -> None:
        """Load the newest state, if there is one."""
        if state := newest_state(self.folder):
            self.accelerator.load_state(state)
            self.accelerator.print(f"Resumed after step {self.progress.step}, from {state}")

    def set_rate(self, rate: float) -> None:
        """Change the peak learning rate, before the first step."""
        self.schedule.base_lrs = [rate] * len(self.schedule.base_lrs)
        for group, factor in zip(self.optimizer.param_groups, self.schedule.lr_lambdas, strict=True):
            group["initial_lr"], group["lr"] = rate, rate * factor(0)

    def train(self, evaluate: Callable[[nn.Module], float] | None) -> None:
        """Make the steps that are left; `evaluate` returns the loss for a point of the recovery curve."""
        progress, save_every = self.progress, self.arguments.save_every
        start = time.perf_counter() - progress.seconds
        self.wrapped.train()
        total, hide_bar = self.arguments.steps, not self.accelerator.is_main_process
        bar = tqdm(total=total, initial=progress.step, desc="fine-tuning", unit="step", disable=hide_bar)
        with StopRequest() as stop, bar:
            for phase in self.plan:
                for step in range(max(progress.step, phase.first_step), phase.first_step + phase.steps):
                    if evaluate and step % self.arguments.eval_every == 0:
                        self.add_curve_point(evaluate, step)
                        self.wrapped.train()
                    loss = self.step(phase, step)
                    self.schedule.step()
                    self.record_step(phase, loss, time.perf_counter() - start)
                    self.show_step(bar)
                    signum = stop.signal_of_any(self.accelerator)
                    if signum or (save_every and progress.step % save_every == 0):
                        state = self.save()
                        if signum:
                            raise Interrupted(signum, state)
        if newest_state(self.folder) != self.folder / state_name(progress.step):
            self.save()  # the measurements that follow take long, and may be interrupted
        if evaluate:
            self.add_curve_point(evaluate, progress.step)
        self.wrapped.eval()
        for tracker in self.accelerator.trackers:  # accelerator.end_training would end the process group as well
            tracker.finish()

    def step(self, phase: Phase, step: int) -> float:
        """Make one optimizer step; return the mean loss per target on the text."""
        options = (self.arguments, self.objective, self.sharing)
        return one_step(self.accelerator, self.wrapped, self.optimizer, phase, step, *options)

    def record_step(self, phase: Phase, loss: float, seconds: float) -> None:
        """Record a step in the progress; raise Diverged if its loss is not finite."""
        if not math.isfinite(loss):
            raise self.divergence(f"the loss became {loss}", self.progress.step + 1)
        self.progress.step += 1
        self.progress.tokens += tokens_per_step(phase, self.arguments, self.accelerator)
        self.progress.losses.append(loss)
        self.progress.seconds = seconds

    def show_step(self, bar: tqdm) -> None:
        """Show the last step on the progress bar, and send it to the tracker."""
        progress, loss = self.progress, self.progress.losses[-1]
        bar.set_postfix(
            loss=f"{loss:.3f}",
            tokens_per_s=f"{progress.tokens / progress.seconds:,.0f}",
            memory=f"{peak_memory(self.accelerator) / 2**30:.1f} GiB",
            refresh=False,
        )
        bar.update()
        rate = self.schedule.get_last_lr()[0]
        self.accelerator.log({"loss": loss, "learning_rate": rate}, step=progress.step)

    def add_curve_point(self, evaluate: Callable[[nn.Module], float], step: int) -> None:
        """Measure a point of the recovery curve."""
        loss = evaluate(self.wrapped)
        self.progress.curve.append({"tokens": self.progress.tokens, "loss": loss})
        self.accelerator.log({"held_out_loss": loss}, step=step)

    def save(self) -> Path:
        """Save a state and return its folder; raise Diverged if a weight is not finite."""
        if not all_finite(self.accelerator, self.wrapped):
            raise self.divergence("the weights are no numbers any more", self.progress.step)
        return save_state(self.accelerator, self.folder, self.progress.step)

    def divergence(self, problem: str, step: int) -> Diverged:
        """Return the error to raise. Its message gives advice and names the newest state."""
        state = newest_state(self.folder)
        return Diverged(
            f"{problem} at step {step}: try a lower --learning-rate or more --warmup-steps"
            + (f"; {state} is from before" if state else "")
        )

    def report(self) -> Results:
        """Return the entry of results.json about the training."""
        progress = self.progress
        return {
            "steps": self.arguments.steps,
            "tokens": progress.tokens,
            "passes_over_the_text": progress.tokens / self.plan[-1].windows.total,
            "seconds": round(progress.seconds, 1),
            "tokens_per_second": round(progress.tokens / progress.seconds, 1),
            "peak_memory_bytes": peak_memory(self.accelerator),
            "loss": progress.losses,
            "curve": progress.curve,
        }


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained weights for an optimizer. Only matrices get weight decay, and no position parameters.

    Position parameters belong to a scheme, wherever in the model it keeps them, or to a base's table of positions.
    """
    positions = {id(weight) for module in position_modules(model) for weight in module.parameters()}
    trained = [weight for weight in model.parameters() if weight.requires_grad]  # with LoRA only a few
    decayed = [weight for weight in trained if weight.dim() > 1 and id(weight) not in positions]
    others = [weight for weight in trained if weight.dim() <= 1 or id(weight) in positions]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def position_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that hold position parameters: modules of schemes, and the table of an unpatched model."""
    yield from (module for module in model.modules() if isinstance(module, PositionModule))
    if (table := position_table(model)) is not None:
        yield table


@dataclass
class Sharing:
    """How the processes divide the windows of a step among themselves.

    Attributes:
        group: the processes that share a sequence; None if no sequence is shared.
        group_index: index of this process's group.
        num_groups: number of groups.
    """

    group: torch.distributed.ProcessGroup | None
    group_index: int
    num_groups: int

    @classmethod
    def of(cls, accelerator: Accelerator, arguments: TrainingArguments) -> "Sharing":
        """Make groups of `--context-parallel` processes."""
        if arguments.context_parallel == 1:
            return cls(None, accelerator.process_index, accelerator.num_processes)
        return cls(*hf_posenc.context_group(arguments.context_parallel))

    def shard(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the shard of a batch that this process computes."""
        if self.group is None:
            return batch
        batch = {name.replace("targets", "shift_labels"): tensor for name, tensor in batch.items()}
        sharded = hf_posenc.shard_sequence(batch, self.group)
        sharded["targets"] = sharded.pop("shift_labels")
        return {name: tensor for name, tensor in sharded.items() if name not in ("labels", "num_items_in_batch")}

    def context(self, wrapped: nn.Module) -> AbstractContextManager[object]:
        """Return the context manager in which forward and backward passes run."""
        return nullcontext() if self.group is None else hf_posenc.context_parallel(wrapped, self.group)


def one_step(
    accelerator: Accelerator,
    wrapped: nn.Module,
    optimizer: AcceleratedOptimizer,
    phase: Phase,
    step: int,
    arguments: TrainingArguments,
    objective: Distillation | LongCE | None,
    sharing: Sharing,
) -> float:
    """Make one optimizer step; return the mean loss per target on the text, over all processes."""
    forwards, processes = arguments.gradient_accumulation, accelerator.num_processes
    per_forward = phase.rows * sharing.num_groups
    first = (step - phase.first_step) * forwards * per_forward
    indices = order(phase.seed, len(phase.windows), first, first + forwards * per_forward)
    batches = [
        sharing.shard(phase.batch(indices[start : start + phase.rows], first + start))
        for start in range(sharing.group_index * phase.rows, len(indices), per_forward)
    ]
    # Windows differ in their number of targets. The mean is over the targets of the step, on whatever process they are.
    local_targets = torch.stack([(batch["targets"] != IGNORED).sum() for batch in batches]).sum().float()
    # In chats a step may contain no target at all: nothing that the assistant says.
    num_targets = max(accelerator.reduce(local_targets.to(accelerator.device), "sum").item(), 1)
    loss_sum = torch.zeros((), device=accelerator.device)
    for batch in batches:
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        targets = batch.pop("targets")
        with accelerator.accumulate(wrapped), sharing.context(wrapped):
            if objective is not None:
                loss, text_loss = objective.loss(wrapped, batch, targets)
            else:
                loss = text_loss = token_loss(wrapped(**batch, use_cache=False).logits, targets)
            # accelerate divides the loss by the number of forward passes, and averages gradients over the processes.
            accelerator.backward(loss * (forwards * processes / num_targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), arguments.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        loss_sum += text_loss.detach()
    return accelerator.reduce(loss_sum, "sum").item() / num_targets


def all_finite(accelerator: Accelerator, model: nn.Module) -> bool:
    """Return whether every weight on every process is a finite number."""
    not_finite = torch.zeros((), device=accelerator.device)
    for weight in model.parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        not_finite += (~local.detach().isfinite()).sum()
    return accelerator.reduce(not_finite, "sum").item() == 0


def tokens_per_step(phase: Phase, arguments: TrainingArguments, accelerator: Accelerator) -> int:
    """Return the number of tokens in one optimizer step, of all processes."""
    groups = accelerator.num_processes // arguments.context_parallel
    return phase.rows * phase.length * arguments.gradient_accumulation * groups


def peak_memory(accelerator: Accelerator) -> int:
    """Return the peak memory of this process in bytes, on its GPU or, without one, in main memory."""
    if accelerator.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --------------------------------------------------------------------------------------------------------------- states


def save_state(accelerator: Accelerator, folder: Path, step: int) -> Path:
    """Save everything that `--resume` needs, all files or none. Then remove older states."""
    state = folder / state_name(step)
    if newest_state(folder) == state:  # saved already, by this run
        return state
    logging.getLogger("accelerate.utils.other").addFilter(_is_not_about_ties)
    with ExitStack() as stack:
        state_folder: list[Path | None] = [None]
        if accelerator.is_main_process:
            discard_states(folder, but=newest_state(folder))
            state_folder = [stack.enter_context(files.new_folder(state))]
        broadcast_object_list(state_folder)
        accelerator.save_state(str(state_folder[0]))
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        discard_states(folder, but=state)
    accelerator.wait_for_everyone()
    return state


def discard_states(folder: Path, but: Path | None) -> None:
    """Remove all states of a folder except `but`, and half-written states that a kill left."""
    for path in [*states(folder), *folder.glob(f"{files.STAGING}-*")]:
        if path != but:
            shutil.rmtree(path)


def _is_not_about_ties(record: logging.LogRecord) -> bool:
    """Return False for accelerate's warning that tied weights are saved only once. Loading ties them again."""
    return "Removed shared tensor" not in record.getMessage()


def state_name(step: int) -> str:
    """Return the folder name of the state after a number of steps."""
    return f"state-{step:06d}"


def states(folder: Path) -> list[Path]:
    """Return the complete states in a folder, oldest first."""
    return sorted(path for path in folder.glob("state-*") if re.fullmatch(r"state-\d{6,}", path.name))


def newest_state(folder: Path) -> Path | None:
    """Return the state to go on from, or None if there is none."""
    return next(reversed(states(folder)), None)


class StopRequest:
    """Context manager that records the first SIGINT or SIGTERM. A second one has its usual effect."""

    signals: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> Self:
        self.received = 0
        self.old_handlers = {number: signal.getsignal(number) for number in self.signals}
        self.listen()
        return self

    def listen(self) -> None:
        """Install the handler."""
        for number in self.signals:
            signal.signal(number, self.note)

    def note(self, number: int, _: object) -> None:
        """Record the first signal, and restore the old handlers."""
        self.received = number
        print("\nStopping after this step; the state is saved first. A second signal stops at once.", file=sys.stderr)
        self.restore()

    def signal_of_any(self, accelerator: Accelerator) -> int:
        """Return the signal that any of the processes received; 0 for none. All processes return the same."""
        if accelerator.num_processes == 1:
            return self.received
        return int(accelerator.gather(torch.tensor([self.received], device=accelerator.device)).max())

    def restore(self, *_: object) -> None:
        """Restore the old handlers."""
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)

    __exit__ = restore
