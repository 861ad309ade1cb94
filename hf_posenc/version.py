"""The version of this package, which checkpoints are stamped with, and how it is installed."""

VERSION = "0.2.0.dev0"

INSTALL = "pip install git+https://github.com/hf-posenc/hf_posenc"
"""From its source: it is on no package index yet."""
