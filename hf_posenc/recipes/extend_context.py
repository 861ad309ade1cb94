"""Extends the context of a causal language model with another position encoding, and measures how far it reaches.

    accelerate launch recipes/extend_context.py                        # the embedded base, minutes on a laptop
    accelerate launch recipes/extend_context.py --config recipes/configs/gpt2_alibi.yaml --output runs/gpt2-alibi

It measures, patches, calibrates, fine-tunes and measures again. Then it writes OUTPUT/report.html, OUTPUT/results.json
and OUTPUT/model (load it with `hf_posenc.from_pretrained`). Plain `python` runs it in one process. Wrong arguments are
found before anything long starts. Ctrl-C saves a state, and `--resume` goes on from it: nothing that is finished
(training a base, measuring it, calibrating) is done again.
"""

from . import program, run_folder
from .one_run import Arguments, run
from .options import parse
from .results import Results

EXAMPLES = """
  {prog}                                                     # the embedded base and text: minutes on two cores
  {prog} --model gpt2 --data book.txt --scheme alibi --train-length 2048 --lengths 1024 2048 4096
  {prog} --config recipes/configs/gpt2_alibi.yaml --data book.txt --seed 1
  accelerate launch -m hf_posenc.recipes.extend_context --model gpt2 --data book.txt     # on many GPUs
"""


def main(argv: list[str] | None = None, prog: str | None = None) -> Results:
    """Make a run and return the content of its results.json."""
    arguments, parser = parse(Arguments, argv, __doc__, prog=prog, examples=EXAMPLES)
    with program.ending(parser, run_folder.resume_command(arguments), lambda: run_folder.kept_message(arguments)):
        return run(arguments)


if __name__ == "__main__":
    program.start(main)
