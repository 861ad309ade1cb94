#!/usr/bin/env python3
"""Writes what pages say of schemes, model types and results between two comments, and the model cards.

python scripts/make_tables.py            # write them
python scripts/make_tables.py --check    # exit 1 if a page is not what is registered and measured
"""

import argparse
import inspect
import json
import math
import re
import statistics
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_posenc
from hf_posenc import Scheme, available_schemes, describe, patch_model
from hf_posenc.checking.catalogue import language_type, refused_types, served_type
from hf_posenc.checkpoints.auto_classes import multimodal_model_types
from hf_posenc.core.registry import scheme_class, supported_model_types
from hf_posenc.recipes import model_card
from hf_posenc.recipes.results import read_json
from hf_posenc.recipes.run_report import as_text
from hf_posenc.schemes.base import EVERY_SCHEME

sys.path.insert(0, str(Path(__file__).parent))
from measure_swaps import LARGE, LATEST, kept_runs, loss_by_length
from measure_swaps import SCHEMES as SWAPS

ROOT = Path(__file__).parents[1]

NEEDED = {"temperature": {"strength": 0.5, "length": 16}}
"""Hyper-parameters without which a scheme refuses these models, because it would change nothing."""

FIRST = ("gpt2", "llama")
"""Model types whose rows come first: what a reader looks for."""


def table(titles: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head, *body = (f"| {' | '.join(cells)} |" for cells in [titles, *rows])
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *body])


def code(names: Iterable[str]) -> str:
    """Names as Markdown code."""
    return ", ".join(f"`{name}`" for name in names)


# Schemes


def first_line(documented: object) -> str:
    """First line of a docstring, without its full stop; a cell of a table."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    return lines[0].rstrip(".").replace("|", r"\|") if lines else ""


def hyperparameters(scheme: type[Scheme]) -> str:
    """`name=default` of each that not every scheme has. `None`: by the base or the scheme, or off."""
    own = [field for field in fields(scheme) if field.name not in EVERY_SCHEME]
    return code(f"{field.name}={field.default!r}".replace("|", r"\|") for field in own) or "none"


def limit(scheme: type[Scheme]) -> str:
    """What limits the positions: what the class says of its `limit`, if it has one of its own."""
    text = "none" if scheme.limit is Scheme.limit else first_line(scheme.limit)
    return text[:1].lower() + text[1:]


def papers(scheme: type[Scheme]) -> str:
    """Links to the papers that the docstring's line `Source:` names; ValueError if it names none."""
    source = re.search(r"^Source: (.+?)(?=\n\n|\Z)", inspect.getdoc(scheme) or "", flags=re.DOTALL | re.MULTILINE)
    text = " ".join(source[1].split()) if source else ""
    found = re.findall(r"([^;]+?), (?:arXiv:(\d{4}\.\d{5})|(https://[^\s;,]+[^\s;,.]))", text)
    if not found:
        raise ValueError(f"the docstring of {scheme.__name__} needs a line `Source: AUTHORS YEAR, arXiv:NUMBER.`")
    return ", ".join(f"[{who.strip()}]({page or f'https://arxiv.org/abs/{number}'})" for who, number, page in found)


def bases(width: int, layers: int, length: int) -> dict[str, PreTrainedModel]:
    """Return a GPT-2 and a LLaMA of this shape, with heads of 64, and next to no vocabulary and MLPs."""
    heads, ends = width // 64, {"vocab_size": 8, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2Config(n_embd=width, n_layer=layers, n_head=heads, n_positions=length, n_inner=8, **ends)
    llama = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
        intermediate_size=8,
        **ends,
    )
    return {"gpt2": GPT2LMHeadModel(gpt2), "llama": LlamaForCausalLM(llama)}


def parameters(scheme: type[Scheme]) -> str:
    """Number of trained parameters that a scheme adds to a LLaMA of GPT-2 small's shape."""
    model = patch_model(bases(768, 12, 1024)["llama"], scheme.name, seed=0, **NEEDED.get(scheme.name, {}))
    return f"{describe(model).parameters:,}"


def exports(scheme: type[Scheme]) -> str:
    """What `export_stock` and `export_gguf` write of a patched GPT-2 or LLaMA."""
    found = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a GGUF file without a tokenizer
        for kind, export in {"stock": hf_posenc.export_stock, "GGUF": hf_posenc.export_gguf}.items():
            families = []
            for family, base in bases(128, 2, 64).items():
                model = patch_model(base, scheme.name, seed=0, **NEEDED.get(scheme.name, {}))
                try:
                    within = {"length": 64} if (kind, scheme.name) == ("stock", "alibi") else {}
                    export(model, Path(folder) / f"{kind} {family}", **within)
                except hf_posenc.UnsupportedModelError:
                    continue
                families.append(family)
            if families:
                found.append(f"{kind} ({', '.join(families)})")
    return ", ".join(found) or "none"


COLUMNS: dict[str, Callable[[type[Scheme]], str]] = {
    "what it does": first_line,
    "hyper-parameters": hyperparameters,
    "limit": limit,
    "parameters": parameters,
    "exports": exports,
    "paper": papers,
}


def schemes() -> str:
    """A row for each scheme; what a column holds is said by its function."""
    rows = ([f"`{name}`", *(cell(scheme_class(name)) for cell in COLUMNS.values())] for name in available_schemes())
    return table(["scheme", *COLUMNS], rows)


# Model types


def served() -> str:
    """What can be patched: model types of which the same is known share a row, the largest row first."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for model_type in supported_model_types():
        alike.setdefault(served_type(model_type), []).append(model_type)
    rows = sorted(alike.items(), key=lambda row: (not set(row[1]) & set(FIRST), -len(row[1]), row[1]))
    return table(
        ["model types", "their own positions", "what to know"],
        ([code(types), known[0], "<br>".join(known[1:])] for known, types in rows),
    )


def refused() -> str:
    """What cannot be patched."""
    return table(["model types", "why"], ([code(types), reason] for reason, types in refused_types().items()))


def multimodal() -> str:
    """Multimodal types whose language model can be patched."""
    types: dict[str, list[str]] = {}
    for model_type in sorted(multimodal_model_types()):
        if (inside := language_type(model_type)) in supported_model_types():
            types.setdefault(inside, []).append(model_type)
    rows = ([f"`{inside}`", code(types[inside])] for inside in sorted(types))
    return table(["language model", "multimodal model types"], rows)


# Results


def swaps() -> str:
    """The perplexity of the base, and of each swap after all of its fine-tuning: mean of the losses over seeds."""
    shown = {
        "the base, untouched": ("control", False),
        f"the base, untouched, in a window of {SWAPS['window'][1]['window']} tokens": ("window, plain", False),
        "`far_rope`, untrained": ("far_rope, plain", False),
        "the base, fine-tuned": ("control", True),
        f"`rope` with YaRN, factor {SWAPS['yarn'][1]['scaling']['factor']:g}": ("yarn, plain", True),
    }
    for scheme in ("transformer_xl", "shaw", "t5", "alibi"):
        options = "".join(f", `{name}={value}`" for name, value in SWAPS[scheme][1].items())
        shown[f"`{scheme}`{options}, plain"] = (f"{scheme}, plain", True)
        shown[f"`{scheme}`{options}, calibrated"] = (f"{scheme}, outputs", True)
    rows = []
    for label, (variant, tuned) in shown.items():
        losses = loss_by_length(variant, tuned=tuned)
        seeds = len(losses[min(losses)]) if tuned else 1  # without training all seeds are one model
        rows.append([label, str(seeds), *map(cell, losses.values())])
    return table(["perplexity at", "seeds", *(f"{length:,}" for length in losses)], rows)


WINDOW = "`window=512, sinks=4`"
RECOVERED = {
    "control": "the base",
    "transformer_xl, plain": "`transformer_xl`, plain swap",
    "transformer_xl_most_window, calibrated": f"`transformer_xl` in 25 of 30 layers, {WINDOW}, calibrated",
    "transformer_xl_every_fourth, calibrated": 'the same in 7 (`"3::4"`)',
    "shaw, calibrated": "`shaw`, calibrated",
}
"""Variant of the latest runs on SmolLM2 -> its name in README's table."""

OTHERS = {
    "t5, calibrated": "`t5`, `share_layers=False`",
    "nope_every_fourth, calibrated": '`nope` in `"3::4"`',
    "transformer_xl_most_window, calibrated in fewer steps": "`transformer_xl` in 25, 47 steps",
    "transformer_xl_most_window, query_key": 'the same, `weights="query_key"`',
}
"""More of them, on the page of results."""

OLDER = {
    "transformer_xl, plain": "`transformer_xl`, plain swap",
    "transformer_xl_window, query_key": f"with {WINDOW}, calibrated",
    "shaw, plain": "`shaw`, plain swap",
    "shaw, query_key": "calibrated",
    "alibi, query_key": "`alibi`, `trainable=True`, calibrated",
}
"""The older runs there."""


def recovered(shown: dict[str, str], results: Path) -> str:
    """What swaps of SmolLM2 cost, before training and after all of it: losses less the untouched base's, and recall."""
    base = {length: losses[0] for length, losses in loss_by_length("control", tuned=False, results=results).items()}
    rows = []
    for variant, label in shown.items():
        runs = kept_runs(variant, results)
        for tuned in (False, True) if "after" in runs[0] else (False,):
            tokens = [run.get("calibration", {}).get("tokens", 0) for run in runs]
            if tuned:
                tokens = [begun + int(max(run["after"], key=int)) for begun, run in zip(tokens, runs, strict=True)]
            losses = loss_by_length(variant, tuned=tuned, results=results)
            more = [gained([each - base[length] for each in losses[length]]) for length in base]
            if variant == "control" and not tuned:
                more = [f"{loss:.2f}" for loss in base.values()]
            key = "recall_after" if tuned else "recall"
            scores = [run[key]["niah_single"] for run in runs if key in run]
            means = (statistics.fmean(each[length] for each in scores) for length in ("512", "1024", "2048"))
            found = ", ".join(f"{mean:.0%}" for mean in means)
            count = f"{round(statistics.fmean(tokens), -3):,.0f}"
            rows.append(["then fine-tuned" if tuned else label, count, *more, found])
    titles = ["nats above the base, at", "tokens read", *(f"{length:,}" for length in base)]
    return table([*titles, "found at 512, 1,024, 2,048"], rows)


def gained(differences: list[float]) -> str:
    """The mean difference of losses, and its standard deviation over seeds."""
    mean = f"{round(statistics.fmean(differences), 2) + 0.0:+.2f}"
    return mean if len(differences) == 1 else f"{mean}±{statistics.stdev(differences):.2f}"


def samples() -> str:
    """What the models of that table write, as a block of text; the begin of it."""
    shown = {"base": ("control", "writes"), "plain swap": ("transformer_xl, plain", "writes")}
    shown |= {
        "calibrated": ("transformer_xl_most_window, calibrated", "writes"),
        "fine-tuned": ("transformer_xl_most_window, calibrated", "writes_after"),
    }
    lines = []
    for label, (variant, key) in shown.items():
        run = kept_runs(variant, LATEST)[0]
        lines.append(f"{label + ':':<11} {textwrap.shorten(run[key], 116, placeholder=' ...')}")
    return "\n".join(["```text", *lines, "```"])


def cell(losses: list[float]) -> str:
    """The perplexity of the mean loss, and the standard deviation over seeds."""
    mean = math.exp(statistics.fmean(losses))
    return f"{mean:.2f}" if len(set(losses)) == 1 else f"{mean:.2f} ± {mean * statistics.stdev(losses):.2f}"


def quickstart() -> str:
    """What the quickstart's run printed, as a block of text; what calibration did is a long line, and left out."""
    results: dict[str, Any] = json.loads((ROOT / "docs/measured/quickstart.json").read_text(encoding="utf-8"))
    return f"```text\n{as_text(results).rpartition(chr(10) * 2)[0]}\n```"


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "schemes": lambda: f"{code(available_schemes())}.",
        "results": lambda: recovered(RECOVERED, LATEST),
        "samples": samples,
    },
    "docs/results.md": {
        "results": swaps,
        "swaps": lambda: recovered(OLDER, LARGE),
        "others": lambda: recovered(OTHERS, LATEST),
    },
    "docs/schemes.md": {"schemes": schemes},
    "docs/families.md": {"families": served, "multimodal": multimodal, "refused": refused},
    "docs/fine_tune.md": {"quickstart": quickstart},
}
"""File -> name of a part -> function that makes it."""


def renewed(text: str, name: str, part: str) -> str:
    """`text` with what stands between the comments of a part renewed; ValueError unless it has both, once, in order."""
    begin, end = f"<!-- {name}: written by scripts/make_tables.py -->", f"<!-- end of {name} -->"
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last) or begin in after or end in after:
        raise ValueError(f"expected one {begin} followed by one {end}")
    return f"{before}{begin}\n{part}\n{end}{after}"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write tables into pages, and model cards.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    check = parser.parse_args().check
    if missing := [model_type for model_type in supported_model_types() if model_type not in CONFIG_MAPPING]:
        print(f"the installed transformers does not have {', '.join(missing)}", file=sys.stderr)
    stale = []
    for page, parts in PAGES.items():
        text = new = (ROOT / page).read_text(encoding="utf-8")
        for name, part in parts.items():
            new = renewed(new, name, part())
        if new != text:
            stale.append(page)
            if not check:
                (ROOT / page).write_text(new, encoding="utf-8")
    if check:
        if stale:
            print(f"{', '.join(stale)}: out of date; run python scripts/make_tables.py")
        return int(bool(stale))
    for found in sorted(ROOT.glob("model_cards/*/results.json")):
        model_card.write(found.parent, read_json(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
