"""What the processes of test_distributed.py run: each function is called on every rank at once."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from decoders import decoder
from families import FAMILIES, VOCAB_SIZE, tiny, tokens
from peft import get_peft_model
from situations import CASES, position_gradients
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import CheckpointError, Matching, calibrate, context_group, context_parallel, patch_model, shard_sequence
from hf_posenc.core.modules import PositionModule
from hf_posenc.evaluation import induction_copy, measure_context
from hf_posenc.model import logits as forwards

IGNORED = -100


def build(family: str, case: str | None, *, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A tiny model in training mode, same on every rank, whose position parameters are far from where they start.

    `case` is a row of `situations.CASES`, None for the stock model; `more` has `config` and hyper-parameters beyond the row's.
    """
    make = tiny if family in FAMILIES else decoder
    model = make(family, **more.pop("config", {})).to(dtype)
    if case is not None:
        scheme, hyperparameters = CASES[case]
        patch_model(model, scheme, seed=3, **(hyperparameters | more))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, PositionModule):
                for parameter in module.parameters(recurse=False):
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model.train()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole tensors on every rank, whatever the model is wrapped in."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))


# ------------------------------------------------------------------------------------------------- context parallelism


def make_batch(kind: str, length: int) -> dict[str, Tensor]:
    """Two sequences: plain, packed (documents of uneven length) or with padding on the left."""
    ids = tokens(2, length)
    labels = ids.clone()
    labels[0, 3:5] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        cuts = ([0, 5, 6, 14, length], [0, length // 2 + 1, length])
        rows = [torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(c)]) for c in cuts]
        batch["position_ids"] = torch.stack(rows)
    elif kind == "left":
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
        mask[1, :1] = 0
        batch |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        labels[mask == 0] = IGNORED
        labels[:, 1:][mask[:, :-1] == 0] = IGNORED  # what padding predicts is nobody's business
    return batch


def one_process(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits, mean loss over all labels, and gradients."""
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
    targets = batch["labels"][:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB_SIZE).double(), targets, ignore_index=IGNORED)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logits.detach(), loss.item(), gradients


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest difference relative to the largest entry of each tensor."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(((found[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp(min=1e-3)).item() for n in wanted)


def own_slots(length: int) -> Tensor:
    """Slots of this rank's shard, padding included."""
    size = dist.get_world_size()
    return torch.arange(length + -length % size).view(size, -1)[dist.get_rank()]


def compare_context_parallel(
    family: str,
    case: str | None,
    kind: str = "plain",
    *,
    length: int = 22,
    checkpointing: bool = False,
    lora: bool = False,
    **more: Any,
) -> dict[str, float]:
    """Differences between one process and a sequence shared by all: of logits, loss and gradients."""
    model = build(family, case, **more)
    batch = make_batch(kind, length)
    if lora:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers in an old way
            torch.manual_seed(0)
            model = get_peft_model(model, hf_posenc.lora_config(model, init_lora_weights=False))
    logits, loss, gradients = one_process(model, batch)
    if checkpointing:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    own = own_slots(length)
    with context_parallel(model):
        out = model(**shard_sequence(batch))
        local = out.loss
        local.backward()
    total = local.detach().clone()
    dist.all_reduce(total)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for gradient in found.values():
        dist.all_reduce(gradient)
    real = own < length
    seen = batch.get("attention_mask", torch.ones(2, length))[:, own[real]].bool()  # padding computes anything
    difference = (out.logits[:, real] - logits[:, own[real]])[seen].abs().max().item()
    return {"logits": difference, "loss": abs(total.item() - loss), "gradients": worst(found, gradients)}


def attend_inside_the_shard(family: str, case: str) -> float:
    """How far logits are from one process when each shard is run by itself: what must never happen silently."""
    model, batch = build(family, case), make_batch("plain", 24)
    with torch.no_grad():
        whole = model(batch["input_ids"], use_cache=False).logits
        own = own_slots(24)
        alone = model(batch["input_ids"][:, own], position_ids=own[None], use_cache=False).logits
    return (alone - whole[:, own]).abs().max().item()


def shard(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return shard_sequence(batch)


def refused(job: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Type and message of the error that a job raises."""
    try:
        job(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def misuse(what: str, case: str = "alibi") -> None:
    """Use context parallelism in a way that cannot be exact."""
    scaled = {"scaling": {"rope_type": what, "factor": 2.0}} if what == "dynamic" else {}
    model = build("llama", case, **scaled)
    ids, rank = tokens(2, 8), dist.get_rank()
    place = torch.arange(8)[None].expand(2, -1) + 8 * rank
    if what == "size":
        context_group(3)
    if what == "accelerate without":
        attach_accelerates_hooks(model)
        model(ids, position_ids=place, use_cache=False)
    if what == "packed under a mask":
        shard_sequence({"input_ids": ids, "attention_mask": ids > 0, "position_ids": place % 4})
    if what == "unknown key":
        shard_sequence({"input_ids": ids, "token_type_ids": ids})
    if what == "two labels":
        shard_sequence({"input_ids": ids, "labels": ids, "shift_labels": ids})
    if what == "another length":
        shard_sequence({"input_ids": ids, "labels": ids[:, 1:]})
    with context_parallel(model):
        if what == "accelerate inside":
            attach_accelerates_hooks(model)
            model(**shard_sequence({"input_ids": ids}))
        if what == "by hand":
            model(ids, position_ids=place, attention_mask=torch.ones(2, 8))
        if what == "cache":
            model(**shard_sequence({"input_ids": ids}), use_cache=True)
        if what == "generate":
            model.generate(ids, max_new_tokens=2)
        if what == "twice":
            with context_parallel(model):
                pass


def attach_accelerates_hooks(model: nn.Module) -> None:
    """What accelerate does to a model when it prepares it with cp_size > 1."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    _attach_context_parallel_hooks(model)


def leaves_no_trace(family: str, case: str | None) -> list[str]:
    """What is different after context_parallel, also after an error."""
    model = build(family, case)
    decoder = model.get_decoder()
    before = (model.config.to_dict(), model.config._attn_implementation, dict(decoder._forward_pre_hooks))
    states = {n: sorted(m.__dict__) for n, m in model.named_modules()}
    try:
        with context_parallel(model):
            raise KeyError("stop")
    except KeyError:
        pass
    after = (model.config.to_dict(), model.config._attn_implementation, dict(decoder._forward_pre_hooks))
    changed = [n for n, m in model.named_modules() if sorted(m.__dict__) != states[n]]
    return changed + [str(pair) for pair in zip(before, after, strict=True) if pair[0] != pair[1]]


# ------------------------------------------------------------------------------------------------------------- training

STEPS = 3


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Not Adam: it divides by the size of a gradient, and some are zero up to rounding (a key bias under softmax).
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_alone(model: nn.Module) -> list[float]:
    """Losses of a few steps on one process."""
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        ids = tokens(4, 20, seed=step)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrap(model: Any, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    decoder = model.get_decoder()
    for layer in decoder.h if hasattr(decoder, "h") else decoder.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextmanager
def accelerated(model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> Iterator[tuple[Any, nn.Module, Any]]:
    """As accelerate prepares them for FSDP2 on accelerators: the distributed type is relabelled here."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of accelerate about its own plugin
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            state_dict_type="FULL_STATE_DICT",
            cpu_ram_efficient_loading=False,
            activation_checkpointing=how == "fsdp2-checkpointing",
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        assert accelerator.is_fsdp2
        try:
            yield accelerator, *accelerator.prepare(model, optimizer)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def train_together(model: nn.Module, optimizer: Any, backward: Callable[[Tensor], None], context: int) -> list[float]:
    """Losses of the same steps on all processes; `context` of them share a sequence, the groups have parts of the batch."""
    size, losses = dist.get_world_size(), []
    group, data_rank, data_size = context_group(context)
    for step in range(STEPS):
        own = tokens(4, 20, seed=step).chunk(data_size)[data_rank]
        if context > 1:
            with context_parallel(model, group):
                loss = model(**shard_sequence({"input_ids": own, "labels": own}, group)).loss * context
                backward(loss)
        else:
            loss = model(input_ids=own, labels=own, use_cache=False).loss
            backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
    return losses


def compare_training(
    family: str, case: str, how: str, *, context: int = 1, folder: str | None = None, **more: Any
) -> dict[str, Any]:
    """Differences from one process: of losses, of final weights, of logits after saving and loading in `folder`.

    `how` is `ddp`, `fsdp2`, or through accelerate: `accelerate-fsdp2` (`-checkpointing`: as the launch files have it).
    """
    alone = build(family, case, **more)
    wanted = train_alone(alone)
    whole = build(family, case, **more)
    if how.startswith("accelerate-"):
        with accelerated(whole, optimizer_of(whole), how.removeprefix("accelerate-")) as (
            accelerator,
            model,
            optimizer,
        ):
            losses = train_together(model, optimizer, accelerator.backward, context)
            state = accelerator.get_state_dict(model)
            whole = accelerator.unwrap_model(model)
    else:
        model = wrap(whole, how)
        losses = train_together(model, optimizer_of(model), Tensor.backward, context)
        state = full_state(whole)
    if folder is not None and dist.get_rank() == 0:
        whole.save_pretrained(folder, state_dict=dict(state))
    answer: dict[str, Any] = {"losses": max(abs(a - b) for a, b in zip(losses, wanted, strict=True))}
    reference = alone.state_dict()
    if state:  # accelerate gathers it on the first process only
        missing = reference.keys() - state.keys()
        assert state.keys() <= reference.keys()
        assert not missing, missing
        reference = {n: reference[n] for n in state}
        answer["weights"] = max((state[n].double() - reference[n].double()).abs().max().item() for n in reference)
    answer["sharded"] = sum(isinstance(p, DTensor) for p in whole.parameters())
    start = build(family, case, **more).state_dict()
    answer["moved"] = max((start[n].double() - reference[n].double()).abs().max().item() for n in reference)
    if folder is not None:
        dist.barrier()
        loaded = hf_posenc.from_pretrained(folder, dtype=torch.float64)
        answer["class"] = type(loaded).__name__
        with torch.no_grad():
            ids = tokens(2, 20)
            answer["saved"] = (loaded(ids).logits - alone.eval()(ids).logits).abs().max().item()
    return answer


def compare_measurements(how: str) -> dict[str, Any]:
    """Largest relative difference of a sharded model's measurements from those of one process, and other counts.

    Windows of several lengths, unlike numbers of batches per process, and logits in pieces: where parameters are
    gathered module by module, a process that calls a module more often than the others waits for them for ever.
    """
    rows = forwards.LOGIT_ROWS
    forwards.LOGIT_ROWS = 10

    def measure(model: nn.Module, distributed: bool) -> tuple[list[float], list[int]]:
        texts = [tokens(1, count, seed=count)[0] for count in (90, 7, 41)]
        measured = measure_context(model, texts, lengths=[8, 32], distributed=distributed)
        cells = induction_copy(model, lengths=[16, 33], trials=3, passage=6, distributed=distributed)
        losses = [part.loss for row in measured for part in (row.sliding, row.non_overlapping, *row.by_position)]
        counts = [part.tokens for row in measured for part in (row.sliding, row.non_overlapping, *row.by_position)]
        return losses + [cell.loss for cell in cells], counts

    try:
        wanted, expected = measure(build("llama", "alibi", dtype=torch.float32), False)
        whole = build("llama", "alibi", dtype=torch.float32)
        losses, counts = measure(wrap(whole, how), True)
    finally:
        forwards.LOGIT_ROWS = rows
    return {
        "losses": losses,
        "difference": max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True)),
        "same counts": counts == expected,
        "sharded": sum(isinstance(p, DTensor) for p in whole.parameters()),
    }


def inspect_wrapped(how: str, action: str) -> None:
    """Ask something of a wrapped model that needs the model itself."""
    model = wrap(build("llama", "alibi-trainable"), how)
    {
        "verify": hf_posenc.verify,
        "unpatch": hf_posenc.unpatch_model,
        "patch": lambda model: patch_model(model, "nope"),
        "save": lambda model: model.save_pretrained("nowhere"),
    }[action](model)


# ---------------------------------------------------------------------------------------------------------- calibration


def calibrated(case: str, batch_size: int) -> tuple[Tensor, list[float]]:
    """All weights of a small model after a calibration, and how far its layers were from the base's attention."""
    scheme, hyperparameters = CASES[case]
    model = patch_model(tiny("llama").double(), scheme, seed=3, **hyperparameters)
    matching = Matching(steps=5, batch_size=batch_size, rate=1e-3, weight_rate=1e-3)
    report = calibrate(model, tokens(14, 20, seed=3), held_out=2, closed_windows=4, matching=matching)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, [layer.after.mean().item() for layer in report.layers]


def compare_calibration(case: str) -> dict[str, Any]:
    """The weights' digest, and their differences: from one process with the windows of all in its batches, and alone."""
    weights, divergences = calibrated(case, 2)
    with patch.object(dist, "is_initialized", return_value=False):
        whole, wanted = calibrated(case, 2 * dist.get_world_size())
        own, _ = calibrated(case, 2)
    return {
        "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "weights": (weights - whole).abs().max().item(),
        "divergences": max(abs(a - b) for a, b in zip(divergences, wanted, strict=True)),
        "alone": (weights - own).abs().max().item(),
    }


def resume_calibration(folder: str) -> dict[str, Any]:
    """A calibration that stopped after its second step and went on, compared with one that did not stop."""

    def calibrated(state: Path | None, last: int) -> Tensor:
        def on_step(step: int, _: float) -> None:
            if step == last:
                raise InterruptedError

        model = patch_model(tiny("llama"), "nope")
        matching = Matching(steps=4, weight_rate=1e-2, state_file=state, on_step=on_step)
        with suppress(InterruptedError):
            calibrate(model, tokens(14, 20, seed=3), held_out=2, closed_windows=4, matching=matching)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    state = Path(folder) / "state"
    whole, half = calibrated(None, 0), calibrated(state, 2)
    dist.barrier()  # the first process has written it
    written = state.stat().st_mtime_ns
    rest = calibrated(state, 0)
    dist.barrier()
    try:
        calibrated(state if dist.get_rank() == 0 else Path(folder) / "elsewhere", 0)
    except CheckpointError as error:
        said = str(error)
    return {
        "half": half.equal(whole),
        "rest": rest.equal(whole),
        "rewritten": state.stat().st_mtime_ns > written,
        "said": said,
    }


# ------------------------------------------------------------------------------------------------------ tensor parallel


def load_tensor_parallel(folder: str) -> Any:
    try:
        from transformers import DistributedConfig
    except ImportError:  # 5.17
        from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    )


# Tied embeddings would be split twice over, and the vocabulary must be divisible.
SPLIT = {"tie_word_embeddings": False, "vocab_size": 98}


def compare_tensor_parallel(case: str, folder: str) -> dict[str, float]:
    """Differences from one process, of logits and of the gradients of position parameters."""
    model = build("llama", case, dtype=torch.float32, config=SPLIT)
    ids = tokens(2, 16)
    place = Path(folder) / case
    if dist.get_rank() == 0:
        model.save_pretrained(place)
    dist.barrier()
    split = load_tensor_parallel(str(place)).train()
    wanted, found = model(ids, labels=ids), split(ids, labels=ids)
    wanted.loss.backward()
    found.loss.backward()
    logits = found.logits.full_tensor() if hasattr(found.logits, "full_tensor") else found.logits
    of_split, of_one = position_gradients(split), position_gradients(model)
    whole, part = (each.model.layers[0].self_attn.q_proj.weight for each in (model, split))
    return {
        "logits": (logits - wanted.logits).abs().max().item(),
        "gradients": worst(of_split, of_one) if of_one else 0.0,
        "split": whole.shape[0] / getattr(part, "to_local", lambda: part)().shape[0],
    }


def patch_tensor_parallel(folder: str) -> None:
    """Patch a stock model that tensor parallelism has split already."""
    if dist.get_rank() == 0:
        tiny("llama", **SPLIT).save_pretrained(folder)
    dist.barrier()
    patch_model(load_tensor_parallel(folder), "alibi")


def fewer_heads() -> None:
    """Hand the attention function half of the heads, as anything does that splits them."""
    model = build("llama", "alibi")
    attention = model.model.layers[0].self_attn
    heads = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    channel = hf_posenc.transformers_glue.masks.position_channel(2, 8, 8)
    hf_posenc.transformers_glue.attention.scheme_attention(attention, heads, heads, heads, channel)
