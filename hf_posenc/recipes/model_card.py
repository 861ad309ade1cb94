"""The model card of a run, made from its results.json alone, so that every number in it was measured."""

import inspect
import shlex
from contextlib import suppress
from pathlib import Path
from typing import cast

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download

from ..analysis import plots
from ..checkpoints.cards import code, fenced, hyperparameter_table, layers_of_schemes, loading_section, plain
from ..core.registry import scheme_class
from .results import Results, last_name, table, without_paths, write_text
from .run_report import curves_by_position, measures_of, perplexity_rows, samples, verdict

PICTURE = "loss_by_position.png"


def write(folder: Path, results: Results) -> None:
    """Write README.md and its picture into the folder of a checkpoint."""
    figure = plots.loss_by_position(curves_by_position(results), trained_length=results["base"]["trained_length"])
    plots.save(figure, folder / PICTURE)
    write_text(folder / "README.md", card(results))


def card(results: Results) -> str:
    """Return the card as Markdown with a YAML head. It names no folder of this machine, because others read it.

    Args:
        results: results of `extend` with a scheme other than `unpatched`.

    Raises:
        UndefinedError, KeyError: the results lack a number that the card needs.
    """
    head = metadata(results)
    results = without_paths(results)
    schemes = results["scheme"].get("schemes", [results["scheme"]])  # the list of a mixture
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"plain": plain, "code": code, "fenced": fenced, "table": table}
    return environment.get_template("card.md").render(
        **results,
        metadata=head.to_yaml(),
        title=title_of(results),
        base_name=Path(results["base"]["name"]).name,
        loading=loading_section("FOLDER_OR_HUB_ID"),
        about="\n\n".join(map(about, schemes)),
        layers=layers_of_schemes([(scheme["name"], scheme.get("layers")) for scheme in schemes]),
        perplexities=perplexity_rows(results),
        measures=[tuple(map(plain, row)) for row in measures_of(results)],
        samples="\n\n".join(samples(results)),
        verdict=verdict(results),
        rate=results["arguments"]["learning_rate"],
        command_line=shlex.join(results["command"]),
    )


def about(scheme: Results) -> str:
    """Return the documentation of a scheme without its arguments, and a table of its hyper-parameters."""
    text = inspect.cleandoc(scheme_class(scheme["name"]).__doc__ or "").partition("\n\nArgs:\n")[0]
    hyperparameters = hyperparameter_table({key: value for key, value in scheme.items() if key != "name"})
    return "\n".join(line.strip() for line in text.splitlines()) + f"\n\n{hyperparameters}"


def title_of(results: Results) -> str:
    """Return a title from the base's name, without folder or organisation, and the scheme's name."""
    return f"{Path(last_name(results['base']['name'])).name} with {results['scheme']['name']}"


def metadata(results: Results) -> ModelCardData:
    """Return the YAML data of the card. License and language come from the base's card, if this machine has it."""
    arguments = results["arguments"]
    base_card = base_card_data(arguments["model"])
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


def base_card_data(model: str | None) -> ModelCardData:
    """Return the YAML data of the base's card, from its folder or the cache of downloads; empty without a card."""
    folder = Path(model or "")
    with suppress(OSError, ValueError):  # no card, not downloaded, or not a repository id
        path = folder / "README.md"
        if model is not None and not folder.is_dir():
            path = Path(hf_hub_download(model, "README.md", local_files_only=True))
        if model is not None:
            return cast(ModelCardData, ModelCard.load(path, ignore_metadata_errors=True).data)
    return ModelCardData()
