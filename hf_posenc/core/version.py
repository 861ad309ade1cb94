"""The version of this package, which every checkpoint records, and how to install the package."""

VERSION = "0.2.0.dev0"

INSTALL = "hf_posenc is installed from a clone of its repository: pip install PATH_OF_THE_CLONE"
"""How to install hf_posenc, for messages. It is on no package index yet."""
