"""Upload a patched checkpoint to the Hugging Face Hub, in one commit.

    python scripts/push_to_hub.py DIRECTORY REPO_ID [--private] [--revision BRANCH] [--token TOKEN] [--message TEXT]

The same as `hf-posenc push`, for a checkout without installation.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_posenc.cli import main

if __name__ == "__main__":
    sys.exit(main(["push", *sys.argv[1:]]))
