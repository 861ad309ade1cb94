"""Writes the tables and figures of sweeps again: starts `hf_posenc.recipes.sweep` from a checkout."""

from hf_posenc.recipes.sweep import main

if __name__ == "__main__":
    main()
