"""Compares schemes on one base, with the same data, seeds and budget, also with the base itself and RoPE's scalings.

    accelerate launch recipes/compare_schemes.py --config recipes/configs/compare_stories.yaml --model DIR --data FILE

Every run is one results.json under OUTPUT/runs; OUTPUT/summary.md, summary.json and the figures are made from them.
Run the same command again to make the runs that are missing and to continue an interrupted one. A folder with runs of
other arguments, another text or another base is refused.
"""

import shutil
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

from accelerate import PartialState
from transformers import AutoConfig, AutoTokenizer

import hf_posenc

from ..did_you_mean import did_you_mean
from ..registry import scheme_class
from . import models, one_run, program, sweep_report, sweep_runs
from .calibration_stage import CalibrationArguments
from .corpus import Text
from .models import UNPATCHED, Schemes, load_named
from .one_run import SharedArguments
from .options import Folder, NotNegative, UsageError, each_once, parse, refuse
from .results import Results, last_name
from .sweep_runs import SweepArguments

EXAMPLES = """
  {prog} --model gpt2 --data book.txt --variants unpatched alibi rope-yarn t5 --seeds 0 1 2
  {prog} --model gpt2 --data book.txt --variants t5 t5+uncalibrated t5+distill --recovery-steps 50
  accelerate launch -m hf_posenc.recipes.compare_schemes --config compare.yaml      # on many GPUs
"""
SCALINGS = ("linear", "dynamic", "yarn")
STRETCHED_ROPE = {kind: f"rope-{kind}" for kind in SCALINGS}
VARIANT_OPTIONS = ("trainable", "uncalibrated", "distill")


@dataclass
class Arguments(SweepArguments, SharedArguments):
    """This recipe.

    Args:
        variants: what to compare: a scheme, or JSON as of --scheme in `extend`; unpatched; or rope-linear,
            rope-dynamic, rope-yarn (RoPE stretched to --train-length). Append +trainable (trainable=true),
            +uncalibrated (--calibrate none, the plain swap) or +distill (divergence from the base, with weight
            --distill).
    """

    variants: list[str] = field(
        default_factory=lambda: [UNPATCHED, "nope", "alibi", "rope-yarn"], metadata={"guesses": ("schemes", "scheme")}
    )
    distill: NotNegative = 1.0
    output: Folder = "runs/compare_schemes"


def main(argv: list[str] | None = None, prog: str | None = None) -> Results:
    """Make the runs that are missing and return the summary."""
    arguments, parser = parse(Arguments, argv, __doc__, prog=prog, examples=EXAMPLES)
    folder = Path(arguments.output)

    def make_run(variant: str, seed: int, target: Path, text: Text, run_identity: Results) -> None:
        before = next((runs[0]["before"] for runs in sweep_runs.read(folder).values()), None)
        own_arguments = run_arguments(arguments, by_label[variant], seed, target)
        one_run.run(own_arguments, one_run.Sweep(text, run_identity, before))
        if not arguments.keep_weights and PartialState().is_main_process:
            shutil.rmtree(target / "model")

    with program.ending(parser, "the same command", lambda: sweep_runs.KEPT):
        variants = check_arguments(arguments)
        by_label = {label_of(variant): variant for variant in arguments.variants}
        sweep_runs.make(arguments, variants, load_named(AutoTokenizer, arguments), make_run)
        summary = sweep_report.summarize(folder, f"Schemes on {last_name(str(arguments.model))}")
    print(sweep_report.markdown(summary))
    return summary


def check_arguments(arguments: Arguments) -> dict[str, Schemes]:
    """Check all variants before the first run; return label of the variant -> schemes."""
    if not any("distill" in split(variant)[1] for variant in arguments.variants):
        refuse(arguments, "distill", "has no effect without variants with +distill")
    each_once(arguments, "variants", "seeds")
    schemes: dict[str, Schemes] = {}
    for variant in arguments.variants:
        label = label_of(variant)
        target = sweep_runs.folder_of_run(Path(arguments.output), label, arguments.seeds[0])
        run = one_run.check_arguments(run_arguments(arguments, variant, arguments.seeds[0], target))
        sweep_runs.add_run(schemes, "variants", label, run)
    return schemes


def split(variant: str) -> tuple[str, list[str]]:
    """Split a variant into its scheme, a name or JSON, and its options."""
    end = max(variant.rfind("}"), variant.rfind("]")) + 1 if models.is_mixture(variant) else 0
    rest, *options = variant[end:].split("+")
    return variant[:end] + rest, options


def label_of(variant: str) -> str:
    """Return the name of a variant, also of its folder. In that of a mixture a label stands instead of JSON."""
    scheme, options = split(variant)
    if models.is_mixture(scheme):
        scheme = models.label_of(models.read_schemes("variants", scheme, {}))
    return "+".join([scheme, *options])


def run_arguments(arguments: Arguments, variant: str, seed: int, target: Path) -> one_run.Arguments:
    """Return the arguments of the run of a variant and a seed.

    Raises:
        UsageError: if there is no such variant.
    """
    if arguments.model is None:
        raise UsageError("--model DIR_OR_ID is missing")
    name, options = split(variant)
    if strange := [word for word in options if word not in VARIANT_OPTIONS]:
        raise UsageError(
            f"--variants {variant}: +{strange[0]} is none of +{', +'.join(VARIANT_OPTIONS)}"
            f"{did_you_mean(strange[0], VARIANT_OPTIONS)}"
        )
    names = (UNPATCHED, *hf_posenc.available_schemes(), *STRETCHED_ROPE.values())
    if name not in names and not models.is_mixture(name):
        meant = did_you_mean(name, STRETCHED_ROPE | {name: name for name in names})
        raise UsageError(f"--variants {variant}: unknown {name!r}; choose from {', '.join(names)}{meant}")
    scheme, hyperparameters = scheme_of(arguments, variant, name)
    if "trainable" in options and models.is_mixture(name):
        raise UsageError(f"--variants {variant}: write trainable into the JSON of a mixture, instead of +trainable")
    if "trainable" in options:
        hyperparameters.append("trainable=true")
    changes = {field.name: getattr(arguments, field.name) for field in fields(SharedArguments)}
    changes |= {"scheme": scheme, "scheme_args": hyperparameters, "seed": seed, "output": str(target)}
    if "uncalibrated" in options:
        if arguments.calibrate == "none":
            raise UsageError(f"--variants {variant}: with --calibrate none every variant is uncalibrated")
        changes |= vars(CalibrationArguments(calibrate="none"))
    changes["distill"] = arguments.distill if "distill" in options else 0.0
    changes["resume"] = (target / "progress.json").is_file() and not (target / "results.json").is_file()
    changes["overwrite"] = not changes["resume"]
    return one_run.Arguments(**changes)


def scheme_of(arguments: Arguments, variant: str, name: str) -> tuple[str, list[str]]:
    """Return the scheme of a variant, and the hyper-parameters that it needs for the lengths of the recipe.

    Args:
        arguments: options of the recipe.
        variant: the whole variant, for the message.
        name: the variant without its options.

    Raises:
        UsageError: if RoPE would be stretched to a length that the base was trained at, or less.
    """
    if models.is_mixture(name):
        return name, []
    scheme, _, scaling = name.partition("-")
    if scaling:
        trained = load_named(AutoConfig, arguments).max_position_embeddings
        if arguments.train_length <= trained:
            raise UsageError(
                f"--variants {variant} stretches RoPE to --train-length {arguments.train_length}, but the base was "
                f"trained at {trained}"
            )
        return scheme, [f'scaling={{"rope_type": "{scaling}", "factor": {arguments.train_length / trained}}}']
    defaults = {} if scheme == UNPATCHED else {field.name: field.default for field in fields(scheme_class(scheme))}
    if defaults.get("num_positions", MISSING) is None:  # a table of positions, by default as long as the base's
        return scheme, [f"num_positions={max(arguments.train_length, *arguments.lengths)}"]
    return scheme, []


if __name__ == "__main__":
    program.start(main)
