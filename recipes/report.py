"""Writes the reports of runs again: starts `hf_posenc.recipes.report` from a checkout."""

from hf_posenc.recipes.report import main

if __name__ == "__main__":
    main()
