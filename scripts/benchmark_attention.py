"""Measure the attention engines against plain causal attention without any positional scheme.

    python scripts/benchmark_attention.py                                     a table for this machine, some minutes
    python scripts/benchmark_attention.py --lengths 8192 --dtypes bfloat16 --schemes alibi --output results.json
    python scripts/benchmark_attention.py --phases decode --heads 32 --kv-heads 8
    python scripts/benchmark_attention.py --whole-models                      GPT-2 and LLaMA, and BLOOM and MPT beside
    python scripts/benchmark_attention.py --banding FOLDER --text book.txt    windows of exact ALiBi on a real model

Every ratio is to `scaled_dot_product_attention(is_causal=True)` of the same shape and dtype. Candidates take turns in one
process, in alternating order; a ratio is the median over rounds of the ratio within a round, with the smallest and the
largest beside it. `naive` is what a user writes: scores, bias and mask of size Q x L. `mask` is the same bias handed to
scaled_dot_product_attention as a float mask. Peak memory is what a process of its own needs above its start.

Run it on a quiet machine, and state the machine: threads that wait for each other make it wrong by factors.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hf_posenc
from hf_posenc.core.attention_call import Call
from hf_posenc.core.dims import Dims
from hf_posenc.core.forms import Bias, Slopes
from hf_posenc.core.positions import Positions
from hf_posenc.core.registry import scheme_class
from hf_posenc.engines import banded, toeplitz
from hf_posenc.engines.dispatch import ENGINES, Engine
from hf_posenc.model.patch_record import patch_of

SCHEMES = ("alibi", "shaw", "da_transformer", "transformer_xl")
PHASES = ("forward", "forward+backward", "decode")
# Beyond this many scores per head a T x T candidate does not fit.
DENSE = 2048 * 2048
# Seconds that a timing takes at least.
SHORTEST = 0.2

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
    module = scheme_class(scheme)().build(Dims(heads, heads, 64, 64 * heads, 1))
    module.reset_parameters()
    return module.to(device)


def candidates(
    scheme: str, phase: str, length: int, heads: int, groups: int, dtype: torch.dtype, device: str
) -> dict[str, Run]:
    """Return what takes turns: the baseline first."""
    q, k, v = inputs(phase, length, heads, groups, dtype, device)
    module, scaling = module_of(scheme, heads, device), 64**-0.5
    repeats = heads // groups
    positions = Positions.causal(q.shape[2], length, device)
    call = Call(q, k, v, positions, scaling=scaling, module=module, form=module.form(q))

    def run(engine: Engine) -> Run:
        # A module of its own: what one keeps between steps of generation the prompt of another would drop.
        own = copy.deepcopy(module)
        return lambda: engine.attend(replace(call, module=own, form=own.form(q)))[0]

    def naive() -> Tensor:
        wide = call.widened()
        return wide.formula.mix(wide, wide.formula.scores(wide).masked_fill(~wide.visible(), -torch.inf).softmax(-1))

    found: dict[str, Run] = {
        "plain": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=phase != "decode", enable_gqa=repeats > 1)
    }
    with torch.set_grad_enabled(phase == "forward+backward"):
        for engine in ENGINES:
            if engine.why_not(call) is None and (engine.name != "reference" or q.shape[2] * length <= DENSE):
                found[engine.name] = run(engine)
    if q.shape[2] * length <= DENSE:
        found["naive"] = naive
        if isinstance(call.form, (Bias, Slopes)):
            mask = call.form.curve(length)[:, positions.distance()[0, 0].clamp(min=0).long()].masked_fill(
                ~positions.visible()[0], -torch.inf
            )
            mask = mask[None].detach().to(dtype)
            found["mask"] = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=repeats > 1)
    if phase != "forward+backward":
        return {name: _without_gradients(each) for name, each in found.items()}
    leaves = [q, k, v]
    return {name: _with_backward(each, leaves) for name, each in found.items()}


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
    calls = {name: max(1, min(100, int(SHORTEST / timed(found[name], device)))) for name in names}
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


def whole_models(lengths: list[int], rounds: int, device: str) -> list[dict[str, Any]]:
    """Return tokens per second of patched GPT-2 and LLaMA, as ratios of time to the stock model.

    Beside GPT-2 stand the models of transformers that were built with ALiBi, of the same sizes.
    """
    import transformers

    def make(family: str, length: int) -> Any:
        vocabulary = {"vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 0}
        if family == "llama":
            sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_hidden_layers": 4}
            config = transformers.LlamaConfig(max_position_embeddings=length + 1, **sizes, **vocabulary)
        elif family == "bloom":
            config = transformers.BloomConfig(hidden_size=768, n_layer=4, n_head=12, **vocabulary)
        elif family == "mpt":
            config = transformers.MptConfig(d_model=768, n_layers=4, n_heads=12, max_seq_len=length + 1, **vocabulary)
        else:
            config = transformers.GPT2Config(n_layer=4, n_positions=length + 1, **vocabulary)
        return transformers.AutoModelForCausalLM.from_config(config).to(device).eval()

    def forward(model: Any, ids: Tensor) -> Run:
        return _without_gradients(lambda: model(ids, use_cache=False))

    def training(model: Any, ids: Tensor) -> Run:
        return lambda: model(ids, labels=ids, use_cache=False).loss.backward()

    def decode(model: Any, ids: Tensor) -> Run:
        with torch.no_grad():
            cache = transformers.DynamicCache(config=model.config)
            model(ids, past_key_values=cache)

        def step() -> None:
            model(ids[:, :1], past_key_values=cache)
            cache.crop(-1)  # the token of this step

        return _without_gradients(step)

    rows = []
    for family in ("gpt2", "llama"):
        for length in lengths:
            models = {"stock": make(family, length)}
            models |= {scheme: hf_posenc.patch_model(make(family, length), scheme, seed=0) for scheme in SCHEMES}
            if family == "gpt2":
                models |= {other: make(other, length) for other in ("bloom", "mpt")}
            ids = torch.randint(1024, (1, length), device=device)
            for phase, start in (("forward", forward), ("forward+backward", training), ("decode", decode)):
                found = {name: start(model, ids) for name, model in models.items()}
                for name, row in measure(found, rounds, device).items():
                    speed = (1 if phase == "decode" else length) / row["milliseconds"] * 1000
                    key = {"model": family, "phase": phase, "length": length, "scheme": name}
                    rows.append({**key, **row, "tokens_per_s": speed})
    return rows


def banding(folder: str, text: str, length: int) -> list[dict[str, Any]]:
    """Return, per layer and head of a model with ALiBi, the window that its own queries and keys allow.

    Args:
        folder: a checkpoint patched with alibi, or a stock one, which is patched here.
        text: file.
        length: tokens.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    if patch_of(model) is None:
        hf_posenc.patch_model(model, "alibi")
    ids = AutoTokenizer.from_pretrained(folder)(Path(text).read_text(encoding="utf-8"), return_tensors="pt").input_ids
    if ids.shape[1] < length:
        raise SystemExit(f"{text} has {ids.shape[1]} tokens, fewer than {length}")
    rows, attend = [], banded.attend

    def watched(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, scaling: float, **options: Any) -> Tensor:
        needed = banded.windows(query, key, slopes, scaling, toeplitz.ROWS)
        pieces = banded.plan(needed, length, length, toeplitz.ROWS)
        for head, slope in enumerate(slopes.tolist()):
            kept = sum((end - i) * (end - j) for i, end, h, h_end, j in pieces if h <= head < h_end)
            whole = sum((end - i) * (end - j) for i, end, _, _, j in toeplitz.whole(length, 1))
            reach = needed[head].clamp(max=length)
            # The bound that the window follows from: the largest own-to-others gap of scores in a block of queries.
            gap = (needed[head] * slope).median().item()
            rows.append(
                {
                    "layer": len(rows) // len(slopes),
                    "head": head,
                    "slope": slope,
                    "gap": gap,
                    "median_window": reach.median().item(),
                    "largest_window": reach.max().item(),
                    "computed": kept / whole,
                }
            )
        return attend(query, key, value, slopes, scaling=scaling, **options)

    banded.attend = watched
    try:
        with torch.no_grad():
            model(ids[:, :length], use_cache=False)
    finally:
        banded.attend = attend
    if not rows:
        raise SystemExit(
            f"no call of {length} tokens goes to the banded engine: {hf_posenc.which_engine(model, length)}"
        )
    return rows


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, help="heads of keys and values; by default as many as --heads")
    parser.add_argument("--candidates", nargs="+", help="measure these only, e.g. banded mask; by default all that fit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--memory", action="store_true", help="also peak memory, one process per candidate")
    parser.add_argument("--whole-models", action="store_true", help="GPT-2 and LLaMA of four layers instead")
    parser.add_argument("--banding", metavar="FOLDER", help="windows of exact ALiBi on this model and --text instead")
    parser.add_argument("--text", help="file, for --banding")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    if options.banding:
        for length in options.lengths:
            for row in banding(options.banding, options.text, length):
                rows.append({"length": length, **row})
                print(
                    f"{length:6} layer {row['layer']:2} head {row['head']:2} slope {row['slope']:.4f}  gap {row['gap']:6.1f}  "
                    f"window {row['median_window']:7.0f}, largest {row['largest_window']:7.0f}  computed {row['computed']:.2f}"
                )
    elif options.whole_models:
        rows = whole_models(options.lengths, options.rounds, options.device)
        for row in rows:
            print(
                f"{row['model']:6} {row['phase']:17} {row['length']:6} {row['scheme']:15} {row['ratio']:6.2f} "
                f"{row['tokens_per_s']:9.0f} tokens/s"
            )
    else:
        print(
            f"{'scheme':15}{'phase':18}{'dtype':10}{'length':>7}  {'candidate':10}{'ratio':>7} {'range':>13} {'ms':>9}  MiB"
        )
        for dtype in options.dtypes:
            for length in options.lengths:
                for phase in options.phases:
                    for scheme in options.schemes:
                        groups = options.kv_heads or options.heads
                        shape = (scheme, phase, length, options.heads, groups, getattr(torch, dtype), options.device)
                        found = candidates(*shape)
                        if options.candidates:
                            found = {n: each for n, each in found.items() if n in ("plain", *options.candidates)}
                        for name, row in measure(found, options.rounds, options.device).items():
                            if options.memory:
                                row["mebibytes"] = peak_memory(shape, name)
                            key = {
                                "scheme": scheme,
                                "phase": phase,
                                "dtype": dtype,
                                "length": length,
                                "candidate": name,
                            }
                            rows.append({**key, **row})
                            spread = f"{row['smallest']:.2f}..{row['largest']:.2f}"
                            print(
                                f"{scheme:15}{phase:18}{dtype:10}{length:7}  {name:10}{row['ratio']:7.2f} {spread:>13} "
                                f"{row['milliseconds']:9.2f}  "
                                + (f"{row['mebibytes']:.0f}" if options.memory else "-"),
                                flush=True,
                            )
    if options.output:
        about = {
            "arguments": sys.argv[1:],
            "machine": processor(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "hf_posenc": hf_posenc.__version__,
            "heads": options.heads,
            "kv_heads": options.kv_heads or options.heads,
            "rounds": options.rounds,
        }
        options.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"written to {options.output}")


if __name__ == "__main__":
    main()
