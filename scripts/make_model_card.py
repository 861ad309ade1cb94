"""Writes the model card of a run, from its results.json alone.

python scripts/make_model_card.py runs/gpt2-alibi/results.json                       # into runs/gpt2-alibi/model
python scripts/make_model_card.py RESULTS.json --folder FOLDER --repository me/name
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import card


def main() -> None:
    """Reads the arguments and writes the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results.json of recipes/extend_context.py")
    parser.add_argument("--folder", type=Path, help="where README.md goes; by default the model folder beside it")
    parser.add_argument("--repository", help="what from_pretrained is given; by default the folder")
    options = parser.parse_args()
    folder = options.folder or options.results.with_name("model")
    try:
        results = card.read(options.results)
        card.write(folder, results, options.repository)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(folder / "README.md")


if __name__ == "__main__":
    main()
