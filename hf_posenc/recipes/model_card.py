"""The model card of a run, made from its results.json alone, so that every number in it was measured."""

import inspect
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download

from ..analysis import plots
from ..checkpoints.cards import hyperparameter_table, layers_of_schemes, loading_section
from ..registry import scheme_class
from .results import Results, filled, last_name, without_paths, write_text
from .run_report import Rows, accuracy_by_length, curves_by_position, perplexity_rows, rate_of, sliding

PICTURE = "loss_by_position.png"
PLACEHOLDER = "FOLDER_OR_HUB_ID"  # stands for the repository, if there is none yet


def write(folder: Path, results: Results, repository: str | None = None) -> None:
    """Write README.md and its picture into the folder of a checkpoint."""
    figure = plots.loss_by_position(curves_by_position(results), trained_length=results["base"]["trained_length"])
    plots.save(figure, folder / PICTURE)
    write_text(folder / "README.md", card(results, repository or PLACEHOLDER))


def card(results: Results, repository: str) -> str:
    """Return the card as Markdown with a YAML head. It names no folder of this machine, because others read it.

    Args:
        results: results of extend_context.py with a scheme other than `unpatched`.
        repository: folder or Hub id from which a user of the card loads the checkpoint.

    Raises:
        KeyError: the results lack a number that the template needs.
    """
    head = metadata(results)
    results = without_paths(results)
    schemes = results["scheme"].get("schemes", [results["scheme"]])  # the list of a mixture
    return filled(
        "card.md",
        **{"calibration": None} | results,
        metadata=head.to_yaml(),
        title=title_of(results),
        base_name=Path(results["base"]["name"]).name,
        loading=loading_section(repository),
        about="\n\n".join(map(about, schemes)),
        layers=layers_of_schemes([(scheme["name"], scheme.get("layers")) for scheme in schemes]),
        perplexities=perplexity_rows(results),
        retrieval=retrieval_rows(results),
        failure=shortcomings(results),
        rate=rate_of(results),
        command_line=shlex.join(results["command"]),
    )


def about(scheme: Results) -> str:
    """Return the documentation of a scheme without its arguments, and a table of its hyper-parameters."""
    text = inspect.cleandoc(scheme_class(scheme["name"]).__doc__ or "").partition("\n\nArgs:\n")[0]
    hyperparameters = hyperparameter_table({key: value for key, value in scheme.items() if key != "name"})
    return "\n".join(line.strip() for line in text.splitlines()) + f"\n\n{hyperparameters}"


def retrieval_rows(results: Results) -> Rows:
    """Return the table of the retrieval test: accuracy by length, before and after. No rows if it was not measured."""
    means = {time: accuracy_by_length(results.get(f"retrieval_{time}", [])) for time in ("before", "after")}
    lengths = sorted({length for accuracies in means.values() for length in accuracies})
    rows: Rows = [("induction copy, accuracy", *map(str, lengths))]
    for time, accuracies in means.items():
        rows.append((time, *(f"{accuracies[length]:.2f}" if length in accuracies else "-" for length in lengths)))
    return rows if lengths else []


def shortcomings(results: Results) -> str:
    """Return a Markdown list of the lengths at which the model is worse than it should be."""
    trained, before, after = results["base"]["trained_length"], sliding(results["before"]), sliding(results["after"])
    lines = []
    if trained in before and trained in after and after[trained] > before[trained]:
        lines.append(
            f"- At {trained} tokens, where the base was trained, it is worse than the base: {after[trained]:.3f} "
            f"against {before[trained]:.3f}. The swap was not recovered within this budget."
        )
    best = min(after, key=lambda length: after[length])
    if worse := [length for length in after if length > best and after[length] > 1.02 * after[best]]:
        lines.append(
            f"- Sliding-window perplexity is best at {best} tokens ({after[best]:.3f}) and more than 2 % worse at "
            f"{', '.join(map(str, worse))}."
        )
    return "\n".join([*lines, f"- Beyond {max(after)} tokens nothing was measured."])


def title_of(results: Results) -> str:
    """Return a title from the base's name, without folder or organisation, and the scheme's name."""
    return f"{Path(last_name(results['base']['name'])).name} with {results['scheme']['name']}"


def metadata(results: Results) -> ModelCardData:
    """Return the YAML data of the card. License and language come from the base's card, if this machine has it."""
    arguments = results["arguments"]
    base_card = base_card_data(arguments["model"], arguments.get("revision"))
    on_the_hub = results["data"].get("kind") == "hub"
    description = arguments["data"][0] if on_the_hub else "held-out text of the run"
    return ModelCardData(
        model_name=title_of(results),
        library_name="hf_posenc",
        pipeline_tag="text-generation",
        tags=["hf_posenc", *dict.fromkeys(results["scheme"]["name"].split(" + ")), "position-encoding"],
        base_model=arguments["model"] if results["base"].get("on_hub") else None,
        license=base_card.license,
        language=base_card.language,
        datasets=arguments["data"] if on_the_hub else None,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=description,
                dataset_name=description,
                metric_type="perplexity",
                metric_name=f"{name} perplexity at {row['length']} tokens",
                metric_value=round(row[method]["perplexity"], 4),
            )
            for row in results["after"]
            if "sliding" in row
            for method, name in (("sliding", "sliding-window"), ("non_overlapping", "non-overlapping"))
        ],
    )


def base_card_data(model: str | None, revision: str | None = None) -> ModelCardData:
    """Return the YAML data of the base's card, from its folder or the cache of downloads; empty without a card."""
    path = None
    if model is not None:
        path = Path(model) / "README.md"
        if not path.is_file():
            with suppress(OSError, ValueError):  # not downloaded, or not a repository id
                path = Path(hf_hub_download(model, "README.md", revision=revision, local_files_only=True))
    if path is None or not path.is_file():
        return ModelCardData()
    data: Any = ModelCard.load(path, ignore_metadata_errors=True).data
    return data
