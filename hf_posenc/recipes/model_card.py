"""The model card of a run, made from its results.json alone: a number that was not measured cannot appear."""

import inspect
import shlex
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download

from ..analysis import plots
from ..checkpoints.cards import hyperparameter_table, layers_of_schemes, loading_section
from ..checkpoints.markdown import code, fenced, plain
from ..registry import scheme_class
from .results import last_name, without_paths, write_text
from .run_report import Rows, accuracy_by_length, curves_by_position, perplexity_rows, rate_of, sliding

TEMPLATE = Path(__file__).with_name("card_template.md")
PICTURE = "loss_by_position.png"
PLACE = "FOLDER_OR_HUB_ID"  # where the checkpoint will be; a push writes the repository


def write(folder: Path, results: dict[str, Any], repository: str | None = None) -> None:
    """Write README.md and its picture beside a checkpoint."""
    drawn = plots.loss_by_position(curves_by_position(results), trained_length=results["base"]["trained_length"])
    plots.save(drawn, folder / PICTURE)
    write_text(folder / "README.md", card(results, repository or PLACE))


def card(results: dict[str, Any], repository: str) -> str:
    """Return the card as Markdown with a YAML head. It names no folder of this machine, because it is for others.

    Args:
        results: of extend_context.py; the scheme must not be `unpatched`.
        repository: what `from_pretrained` is given to load the checkpoint.

    Raises:
        KeyError: a number that the template names is missing from the results.
    """
    head = metadata(results)
    results = without_paths(results)
    base, scheme = results["base"], results["scheme"]
    about = inspect.cleandoc(scheme_class(scheme["name"]).__doc__ or "").partition("\n\nArgs:\n")[0]
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        metadata=head.to_yaml(),
        title=plain(title_of(results)),
        base_name=plain(Path(base["name"]).name),
        scheme=code(scheme["name"]),
        train_length=plain(results["arguments"]["train_length"]),
        trained_length=plain(base["trained_length"]),
        loading=loading_section(repository),
        about="\n".join(line.strip() for line in about.splitlines()),
        hyperparameters=hyperparameter_table({key: value for key, value in scheme.items() if key != "name"}),
        layers=layers_of_schemes([(scheme["name"], scheme.get("layers"))]),
        verification=fenced(results["verify"]),
        held_out=f"{results['data']['held_out_tokens']:,}",
        data=plain(results["data"]["description"]),
        perplexities=markdown_table(perplexity_rows(results)),
        retrieval=retrieval(results),
        failure=failure(results),
        calibration=calibration_text(results.get("calibration")),
        training=training_table(results),
        command=fenced(shlex.join(results["command"])),
        seed=plain(results["seed"]),
    )


def training_table(results: dict[str, Any]) -> str:
    """Return the table of what the training took."""
    training, rank, hardware = results["training"], results["arguments"]["lora_rank"], results["hardware"]
    return markdown_table(
        [
            ("training", ""),
            ("tokens", f"{training['tokens']:,} ({training['passes_over_the_text']:.2f} passes over the text)"),
            ("optimizer", f"AdamW, {training['steps']} steps, learning rate {rate_of(results)}"),
            ("weights", f"LoRA of rank {rank}" if rank else "all"),
            ("speed", f"{training['tokens_per_second']:,.0f} tokens per second"),
            ("hardware", plain(f"{hardware['processes']} x {hardware['device']}")),
            ("versions", plain(", ".join(f"{name} {value}" for name, value in results["versions"].items()))),
        ]
    )


def calibration_text(calibration: dict[str, Any] | None) -> str:
    """Return the paragraph on the calibration; results of older versions do not mention it."""
    if calibration is None:
        return "The swap was not calibrated: the version that made it could not."
    if calibration["method"] == "none":
        return f"The swap was not calibrated: {plain(calibration['why'])}."
    divergence, losses = calibration["divergence"], calibration["held_out_loss"]
    steps = f", then {calibration['steps']:,} steps that match the base's attention" if calibration["steps"] else ""
    remarks = " ".join(plain(remark) for remark in calibration.get("remarks", ()))
    text = f"Before the fine-tuning the scheme took over what the base's positions did. {remarks}".rstrip()
    table = markdown_table(
        [
            ("calibration", ""),
            ("stages", f"closed forms{steps}"),
            ("fitted", plain(calibration["moved"])),
            ("layers", ", ".join(plain(layer["index"]) for layer in calibration["layers"])),
            ("tokens read", f"{calibration['tokens']:,}"),
            (
                "divergence from the base's attention, in nats per query",
                f"{divergence['before']:.3f} as swapped, {divergence['closed']:.3f} after the closed forms, "
                f"{divergence['after']:.3f} at the end",
            ),
            (
                f"held-out loss at {losses['length']:,} tokens, in nats per token",
                f"base {losses['base']:.3f}, swapped {losses['swapped']:.3f}, calibrated {losses['calibrated']:.3f}",
            ),
        ]
    )
    return f"{text}\n\n{table}"


def retrieval(results: dict[str, Any]) -> str:
    """Return the table of the retrieval test's accuracy by length, before and after."""
    means = {time: accuracy_by_length(results.get(f"retrieval_{time}", [])) for time in ("before", "after")}
    lengths = sorted({length for accuracies in means.values() for length in accuracies})
    if not lengths:
        return "Retrieval was not measured."
    rows: Rows = [("induction copy, accuracy", *map(str, lengths))]
    for time, accuracies in means.items():
        rows.append((time, *(f"{accuracies[length]:.2f}" if length in accuracies else "-" for length in lengths)))
    return markdown_table(rows)


def failure(results: dict[str, Any]) -> str:
    """Return where the numbers are worse than they should be, as a list."""
    trained, before, after = results["base"]["trained_length"], sliding(results["before"]), sliding(results["after"])
    lines = []
    if trained in before and trained in after and after[trained] > before[trained]:
        lines.append(
            f"- At the base's own {trained} tokens it is worse than the base was: {after[trained]:.3f} against "
            f"{before[trained]:.3f}. The swap was not recovered within this budget."
        )
    best = min(after, key=lambda length: after[length])
    if worse := [length for length in after if length > best and after[length] > 1.02 * after[best]]:
        lines.append(
            f"- Sliding-window perplexity is best at {best} tokens ({after[best]:.3f}) and more than 2 % worse at "
            f"{', '.join(map(str, worse))}."
        )
    return "\n".join([*lines, f"- Beyond {max(after)} tokens nothing was measured."])


def markdown_table(rows: Rows) -> str:
    """Return rows as a Markdown table."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def title_of(results: dict[str, Any]) -> str:
    """Return the base's name, without its folder or organisation, and the scheme's."""
    return f"{Path(last_name(results['base']['name'])).name} with {results['scheme']['name']}"


def metadata(results: dict[str, Any]) -> ModelCardData:
    """Return what a page of the Hub reads. License and language are those of the base's own card, if it is here."""
    arguments = results["arguments"]
    own = card_of(arguments["model"], arguments.get("revision"))
    on_the_hub = results["data"].get("kind") == "hub"
    description = arguments["data"][0] if on_the_hub else "held-out text of the run"
    return ModelCardData(
        model_name=title_of(results),
        library_name="hf_posenc",
        pipeline_tag="text-generation",
        tags=["hf_posenc", results["scheme"]["name"], "position-encoding"],
        base_model=arguments["model"] if results["base"].get("on_hub") else None,
        license=own.license,
        language=own.language,
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


def card_of(model: str | None, revision: str | None = None) -> ModelCardData:
    """Return the data of the base's own card, from its folder or the cache of downloads; empty without a card."""
    path = None
    if model is not None:
        path = Path(model) / "README.md"
        if not path.is_file():
            with suppress(OSError, ValueError):  # not downloaded, or no name of a repository
                path = Path(hf_hub_download(model, "README.md", revision=revision, local_files_only=True))
    if path is None or not path.is_file():
        return ModelCardData()
    data: Any = ModelCard.load(path, ignore_metadata_errors=True).data
    return data
