"""Does a model use far text? Repeat gain, and LongPPL with a judge, on the held-out text of `evaluate`."""

from dataclasses import dataclass, field

from accelerate import Accelerator
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..evaluation import long_perplexity, repeat_gain
from .corpus import Document, stream
from .models import load, position_limit
from .options import Checkpoint, Count, Options, as_usage_error, refuse
from .results import Results


@dataclass
class FarTextArguments(Options):
    """Use of far text.

    Args:
        repeat_gain: distances in tokens, at least 64, at which passages of the text are repeated.
        long_perplexity: checkpoint that judges which tokens LongPPL counts: the unpatched base of --model, or --model.
        judge_length: tokens in a window of the judge, its trained length (default: the shortest of --lengths).
    """

    repeat_gain: list[int] = field(default_factory=list)
    long_perplexity: Checkpoint | None = None
    judge_length: Count | None = None


def check(arguments: FarTextArguments) -> None:
    """Raise UsageError for an option that has no effect."""
    if arguments.long_perplexity is None:
        refuse(arguments, "judge_length", "has no effect without --long-perplexity")


def measure(
    model: PreTrainedModel,
    documents: list[Document],
    lengths: list[int],
    arguments: FarTextArguments,
    accelerator: Accelerator,
) -> Results:
    """Return what --repeat-gain and --long-perplexity ask for, and print a line for each distance and length.

    Args:
        model: model to measure, on its device.
        documents: text to measure on, which is concatenated.
        lengths: context lengths for LongPPL, of which those are measured that the judge and the model can read.
        arguments: checked options.
        accelerator: accelerator of the processes, which share the work.
    """
    tokens, limit, results = stream(documents).tokens, position_limit(model), Results()
    shared = {"distributed": accelerator.num_processes > 1, "progress": accelerator.is_main_process}
    if arguments.repeat_gain:
        with as_usage_error("--repeat-gain: ", ValueError):
            if limit is not None and max(arguments.repeat_gain) + 128 > limit:
                raise ValueError(f"contexts have 128 tokens more, and the table of the model ends at {limit}")
            gains = repeat_gain(model, tokens, distances=arguments.repeat_gain, passage=64, lead=64, **shared)
        for gain in gains:
            accelerator.print(
                f"{gain.distance:>10}  repeat gain {gain.gain:.3f} +- {gain.gain_error:.3f} nats, in place "
                f"{gain.gain_in_place:.3f} +- {gain.gain_in_place_error:.3f}"
            )
        results["repeat_gain"] = [gain.to_dict() for gain in gains]
    if arguments.long_perplexity is not None:
        judge = load(AutoModelForCausalLM, arguments.long_perplexity, "long_perplexity", dtype=model.dtype)
        judge.to(model.device)
        length = arguments.judge_length or lengths[0]
        possible = [each for each in lengths if each >= length and (limit is None or each <= limit)]
        with as_usage_error("--long-perplexity: ", ValueError):
            rows = long_perplexity(model, judge, tokens, judge_length=length, lengths=possible, **shared)
        for row in rows:
            number = "-" if row.perplexity is None else f"{row.perplexity:.3f}"
            blind = ": too few, LongPPL is blind here" if row.blind else ""
            accelerator.print(f"{row.length:>10}  LongPPL {number}, {row.key_share:.2%} key tokens{blind}")
        results["long_perplexity"] = [row.to_dict() for row in rows]
    return results
