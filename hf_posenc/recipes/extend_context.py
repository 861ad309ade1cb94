"""Extends the context of a causal language model with another position encoding, and measures how far it reaches.

It measures, patches, calibrates, fine-tunes and measures again. Then it writes OUTPUT/results.json and OUTPUT/model,
with a card of what was measured (load it with `hf_posenc.from_pretrained`). Wrong arguments are found before anything
long starts. Ctrl-C saves a state, and `--resume` goes on from it: nothing that is finished is done again.

Examples:
  hf-posenc extend                                               # the embedded base and text: minutes on two cores
  hf-posenc extend --model gpt2 --data book.txt --scheme t5 --train-length 2048
  hf-posenc extend --config recipes/configs/gpt2_alibi.yaml --data book.txt --seed 1
  accelerate launch -m hf_posenc.recipes.extend_context --model gpt2 --data book.txt     # on many GPUs
"""

from . import program
from .one_run import Arguments, run
from .options import parse
from .results import Results


def main(argv: list[str] | None = None, prog: str | None = None) -> Results:
    """Make a run and return the content of its results.json."""
    arguments, parser = parse(Arguments, argv, __doc__, prog)
    advice = f"What is finished is kept in {arguments.output}: the same command with --resume goes on"
    with program.ending(parser, advice):
        return run(arguments)


if __name__ == "__main__":
    program.start(main)
