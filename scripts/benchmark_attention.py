"""Measure the attention engines against plain causal attention without any positional scheme.

    python scripts/benchmark_attention.py                                     a table for this machine, some minutes
    python scripts/benchmark_attention.py --lengths 8192 --dtypes bfloat16 --schemes alibi --output results.json
    python scripts/benchmark_attention.py --phases decode --heads 32 --kv-heads 8
    python scripts/benchmark_attention.py --whole-models                      LLaMAs of four layers, eager and compiled

Every ratio is to `scaled_dot_product_attention(is_causal=True)` of the same shape and dtype. Candidates take turns in one
process, in alternating order; a ratio is the median over rounds of the ratio within a round, with the smallest and the
largest beside it. `naive` is what a user writes: scores, bias and mask of size Q x L. `mask` is the same bias handed to
scaled_dot_product_attention as a float mask. Peak memory is what a process of its own needs above its start.

Run it on a quiet machine, and state the machine: threads that wait for each other make it wrong by factors.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hf_posenc
from hf_posenc.checkpoints.files import replaced
from hf_posenc.core.attention_call import Call
from hf_posenc.core.dims import Dims
from hf_posenc.core.forms import Bias, Slopes
from hf_posenc.core.modules import WithoutPositions
from hf_posenc.core.positions import Positions
from hf_posenc.core.registry import scheme_class
from hf_posenc.engines import dispatch
from hf_posenc.engines.dispatch import ENGINES, Engine

SCHEMES = ("alibi", "shaw", "da_transformer", "transformer_xl", "t5", "kerple", "forgetting", "far_rope")
FAR_ROPE = scheme_class("far_rope")(near=1024)
# In whole models forget gates stand beside the base's rotation.
WHOLE = {"forgetting": ["rope", "forgetting"], "far_rope": FAR_ROPE}
PHASES = ("forward", "forward+backward", "decode")
OF_MODELS = ("training", "packed training", "prompt", "token", "compiled training", "compiled prompt")
# Beyond this many scores per head a T x T candidate does not fit.
DENSE = 2048 * 2048
# Seconds that a timing takes at least, by device.
SHORTEST = {"cpu": 0.2, "cuda": 0.03}

Run = Callable[[], Any]


def processor() -> str:
    """Return the processor's name and what of it decides speed here."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        flags = next(line for line in lines if line.startswith("flags")).split()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
    return " ".join(
        [name, torch.backends.cpu.get_cpu_capability(), *(f for f in ("avx512_bf16", "amx_bf16") if f in flags)]
    )


def inputs(
    phase: str, length: int, heads: int, groups: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries = 1 if phase == "decode" else length
    shapes = ((heads, queries), (groups, length), (groups, length))
    made = (torch.randn(1, *shape, 64, generator=generator) for shape in shapes)
    q, k, v = (each.to(device=device, dtype=dtype) for each in made)
    if phase == "forward+backward":
        q, k, v = (each.requires_grad_() for each in (q, k, v))
    return q, k, v


def module_of(scheme: str, heads: int, device: str) -> Any:
    if scheme == "forgetting":  # its gates are those of tokens, see `candidates`
        return WithoutPositions()
    chosen = FAR_ROPE if scheme == "far_rope" else scheme_class(scheme)()
    module = chosen.build(Dims(heads, heads, 64, 64 * heads, 1))
    module.reset_parameters()
    return module.to(device)


def candidates(
    scheme: str, phase: str, length: int, heads: int, groups: int, dtype: torch.dtype, device: str
) -> dict[str, Run]:
    """Return what takes turns: the baseline first."""
    q, k, v = inputs(phase, length, heads, groups, dtype, device)
    module, scaling = module_of(scheme, heads, device), 64**-0.5
    repeats = heads // groups
    positions = replace(Positions.causal(q.shape[2], length, device), memo={})  # which all layers of a model share
    call = Call(q, k, v, positions, scaling=scaling)
    if scheme == "forgetting":
        gates = -torch.rand(1, heads, length, device=device) / 10
        call = replace(call, log_gates=gates.requires_grad_(phase == "forward+backward"))

    handed: list[Call] = []
    module(call, lambda given: (handed.append(given) or q, None))  # rotated, where the scheme rotates

    def run(engine: Engine) -> Run:
        # A module of its own: what one keeps between steps of generation the prompt of another would drop.
        own = copy.deepcopy(module)
        return lambda: own(call, engine.attend)[0]

    def dense(given: Call) -> tuple[Tensor, None]:
        wide = given.widened()
        scores = wide.formula.scores(wide).masked_fill(~wide.visible(), -torch.inf)
        return wide.formula.mix(wide, scores.softmax(-1)), None

    found: dict[str, Run] = {
        "plain": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=phase != "decode", enable_gqa=repeats > 1)
    }
    with torch.set_grad_enabled(phase == "forward+backward"):
        for engine in ENGINES:
            if engine.refusal(handed[0]) is None and (engine.name != "reference" or q.shape[2] * length <= DENSE):
                found[engine.name] = run(engine)
    found["auto"] = lambda: module(call, dispatch.attend)[0]
    if device == "cuda":
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            found[name] = by_kernel(found["plain"], backend)
    if q.shape[2] * length <= DENSE:
        found["naive"] = lambda: module(call, dense)[0]
        form = handed[0].form
        if isinstance(form, (Bias, Slopes)):
            mask = form.curve(length)[:, positions.distance()[0, 0].clamp(min=0).long()].masked_fill(
                ~positions.visible()[0], -torch.inf
            )
            mask = mask[None].detach().to(dtype)
            found["mask"] = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=repeats > 1)
    if phase != "forward+backward":
        return {name: _without_gradients(each) for name, each in found.items()}
    leaves = [q, k, v]
    return {name: _with_backward(each, leaves) for name, each in found.items()}


def by_kernel(function: Run, backend: SDPBackend) -> Run:
    """Return a call of `scaled_dot_product_attention` by one kernel."""

    def call() -> Any:
        with sdpa_kernel(backend):
            return function()

    return call


def _without_gradients(function: Run) -> Run:
    def call() -> Any:
        with torch.no_grad():
            return function()

    return call


def _with_backward(function: Run, leaves: list[Tensor]) -> Run:
    def call() -> Any:
        output = function()
        return torch.autograd.grad(output.float().sum(), leaves)

    return call


def timed(function: Run, device: str, calls: int = 1) -> float:
    """Return seconds per call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def measure(found: dict[str, Run], rounds: int, device: str) -> dict[str, dict[str, float]]:
    """Return per candidate the median ratio to the first, its range, and milliseconds."""
    names = list(found)
    for function in found.values():
        function()
    # Short calls several times in a row: one alone measures the clock and the threads that wake up.
    calls = {name: max(1, min(100, int(SHORTEST[device] / timed(found[name], device)))) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            seconds[name].append(timed(found[name], device, calls[name]))
    base = seconds[names[0]]
    rows = {}
    for name in names:
        ratios = [mine / plain for mine, plain in zip(seconds[name], base, strict=True)]
        rows[name] = {
            "ratio": statistics.median(ratios),
            "smallest": min(ratios),
            "largest": max(ratios),
            "milliseconds": 1000 * statistics.median(seconds[name]),
        }
    return rows


def _peak(arguments: tuple[Any, ...], name: str, pipe: Any) -> None:
    function = candidates(*arguments)[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    function()
    pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def peak_memory(arguments: tuple[Any, ...], name: str) -> float:
    """Return MiB that one call needs above its inputs, in a fresh process (CPU) or by the allocator (CUDA)."""
    if arguments[-1] == "cuda":
        function = candidates(*arguments)[name]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_peak, args=(arguments, name, sender))
    process.start()
    value = receiver.recv() if receiver.poll(600) else float("nan")
    process.join()
    return float(value)


def whole_models(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield milliseconds and memory of LLaMAs of four layers, as ratios to the stock model's, eager and compiled.

    On CUDA they have the shape of a model of 1B (32 heads of 64 over 8), in bfloat16; on a CPU a smaller one, in float32.
    """
    import transformers

    device, lengths = options.device, options.lengths
    wide = device == "cuda"
    width, heads, groups = (2048, 32, 8) if wide else (768, 12, 4)
    config = transformers.LlamaConfig(
        vocab_size=32000 if wide else 1024, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=max(lengths) + 64,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16 if wide else torch.float32)
    for length in lengths:
        ids = torch.randint(config.vocab_size, (1, length), device=device)
        found: dict[tuple[str, str], dict[str, float]] = {}
        for scheme in ("stock", *options.schemes):
            if scheme != "stock":
                hf_posenc.patch_model(model, WHOLE.get(scheme, scheme), seed=0).to(device)
            for phase, call in phases(model, ids).items():
                is_compiled = phase.startswith("compiled")
                if phase not in options.phases or (
                    is_compiled and (scheme not in options.compile or length != lengths[0])
                ):
                    continue
                try:
                    row: dict[str, Any] = single(call, options.rounds, device)
                except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
                    row = {"failed": f"{type(error).__name__}: {error}"[:300]}
                model.zero_grad(set_to_none=True)
                found[scheme, phase] = row
                stock = found.get(("stock", phase), {}).get("milliseconds")
                if stock and "failed" not in row:
                    row["ratio"] = row["milliseconds"] / stock
                yield {"scheme": scheme, "phase": phase, "length": length, **row}
            if scheme != "stock":
                hf_posenc.unpatch_model(model)


def phases(model: Any, ids: Tensor) -> dict[str, Run]:
    """Return what is timed of a model: steps of training, a prompt, a token after it; steps and prompts compiled too."""
    from transformers import DynamicCache

    def training() -> None:
        model.train()(ids, labels=ids, use_cache=False).loss.backward()

    # Eight documents in a row, as collators without padding make them.
    places = torch.arange(ids.shape[1], device=ids.device)[None] % max(1, ids.shape[1] // 8)

    def packed_training() -> None:
        model.train()(ids, labels=ids, position_ids=places, use_cache=False).loss.backward()

    @torch.no_grad()
    def prompt() -> None:
        model.eval()(ids, use_cache=False, logits_to_keep=1)

    kept: list[Any] = []

    @torch.no_grad()
    def token() -> None:
        if not kept:
            kept.append(DynamicCache(config=model.config))
            model.eval()(ids, past_key_values=kept[0], logits_to_keep=1)
        model(ids[:, :1], past_key_values=kept[0])
        kept[0].crop(-1)

    compiled: dict[bool, Any] = {}

    def by_compiler(training: bool) -> Any:
        model.train(training)
        if training not in compiled:
            compiled[training] = torch.compile(model)
        return compiled[training]

    def compiled_training() -> None:
        by_compiler(True)(ids, labels=ids, use_cache=False).loss.backward()

    @torch.no_grad()
    def compiled_prompt() -> None:
        by_compiler(False)(ids, use_cache=False, logits_to_keep=1)

    eager = {"training": training, "packed training": packed_training, "prompt": prompt, "token": token}
    return {**eager, "compiled training": compiled_training, "compiled prompt": compiled_prompt}


def single(function: Run, rounds: int, device: str) -> dict[str, float]:
    """Return the first call's seconds, the median milliseconds of others, and GiB above what is held (CUDA)."""
    first = timed(function, device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    milliseconds = 1000 * statistics.median(timed(function, device, 3) for _ in range(rounds))
    row = {"milliseconds": milliseconds, "first_s": first}
    if device == "cuda":
        row["gibibytes"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return row


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES[:4])
    parser.add_argument(
        "--phases",
        nargs="+",
        choices=PHASES + OF_MODELS,
        help="by default all, those from training on for --whole-models",
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, help="heads of keys and values; by default as many as --heads")
    parser.add_argument("--candidates", nargs="+", help="measure these only, e.g. banded mask; by default all that fit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--memory", action="store_true", help="also peak memory, one process per candidate")
    parser.add_argument("--whole-models", action="store_true", help="LLaMAs of four layers instead")
    parser.add_argument("--compile", nargs="+", default=[], help="of --whole-models, also compiled, e.g. stock alibi")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    options.phases = options.phases or (OF_MODELS if options.whole_models else PHASES)

    about = {
        "arguments": sys.argv[1:],
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "hf_posenc": hf_posenc.__version__,
        "rounds": options.rounds,
    }
    if not options.whole_models:
        about |= {"heads": options.heads, "kv_heads": options.kv_heads or options.heads}
    rows: list[dict[str, Any]] = []
    for row in whole_models(options) if options.whole_models else calls_of_attention(options):
        rows.append(row)
        print("  ".join(f"{name} {shown(value)}" for name, value in row.items()), flush=True)
        if options.output:  # after each row, so that what an interrupted run has measured is there
            with replaced(options.output) as path:
                path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def shown(value: Any) -> str:
    """Return a value as it is printed."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def calls_of_attention(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the ratios of the candidates for each dtype, length, phase and scheme."""
    groups = options.kv_heads or options.heads
    for dtype, length, phase, scheme in itertools.product(
        options.dtypes, options.lengths, options.phases, options.schemes
    ):
        shape = (scheme, phase, length, options.heads, groups, getattr(torch, dtype), options.device)
        found = candidates(*shape)
        if options.candidates:
            found = {n: each for n, each in found.items() if n in ("plain", *options.candidates)}
        for name, row in measure(found, options.rounds, options.device).items():
            if options.memory:
                row["mebibytes"] = peak_memory(shape, name)
            yield {"scheme": scheme, "phase": phase, "dtype": dtype, "length": length, "candidate": name, **row}


if __name__ == "__main__":
    main()
