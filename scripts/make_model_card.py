"""Writes the model card of a run, from its results.json alone.

python scripts/make_model_card.py runs/gpt2-alibi/results.json                       # into runs/gpt2-alibi/model
python scripts/make_model_card.py RESULTS.json --folder FOLDER --repository me/name
python scripts/make_model_card.py --committed                                         # every card in model_cards/
"""

import argparse
from pathlib import Path

from hf_posenc.recipes import model_card
from hf_posenc.recipes.results import read_json

CARDS = Path(__file__).parents[1] / "model_cards"


def main() -> None:
    """Reads the arguments and writes the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="results.json of recipes/extend_context.py")
    parser.add_argument("--folder", type=Path, help="where README.md goes; by default the model folder beside it")
    parser.add_argument(
        "--repository", help="what from_pretrained is given; by default a placeholder, which a push fills in"
    )
    parser.add_argument("--committed", action="store_true", help="every folder of model_cards/ that has a source.json")
    options = parser.parse_args()
    if (options.results is None) is not options.committed:
        parser.error("give either one results.json or --committed")
    jobs = (
        [(options.results, options.folder or options.results.with_name("model"), options.repository)]
        if options.results
        else []
    )
    for source in sorted(CARDS.glob("*/source.json")) if options.committed else []:
        said = read_json(source)
        jobs.append((CARDS / said["results"], source.parent, said["repository"]))
    for results, folder, repository in jobs:
        try:
            model_card.write(folder, read_json(results), repository)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        except KeyError as error:
            parser.error(f"{results} has no {error}: it is not of recipes/extend_context.py with a patched model")
        print(folder / "README.md")


if __name__ == "__main__":
    main()
