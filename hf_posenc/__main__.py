"""The command `hf-posenc`, as `python -m hf_posenc`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
