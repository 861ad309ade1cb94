"""The version of this package, which checkpoints are stamped with, and how it is installed."""

VERSION = "0.2.0.dev0"

INSTALL = "hf_posenc is installed from a clone of its repository: pip install PATH_OF_THE_CLONE"
"""From its source: it is on no package index yet."""
