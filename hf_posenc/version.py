"""The version of this package, which checkpoints are stamped with."""

VERSION = "0.2.0.dev0"
