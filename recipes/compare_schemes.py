"""Compares schemes on one base: starts `hf_posenc.recipes.compare_schemes` from a checkout, for `accelerate launch recipes/compare_schemes.py`."""

from hf_posenc.recipes import program
from hf_posenc.recipes.compare_schemes import main

if __name__ == "__main__":
    program.start(main)
