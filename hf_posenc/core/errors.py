"""The errors of this package. Each error also derives from the built-in error that a caller would expect."""


class HfPosencError(Exception):
    """Base of all errors of this package. Wrong hyper-parameters raise TypeError or ValueError instead."""


class UnknownSchemeError(HfPosencError, ValueError):
    """The scheme's name is not registered."""


class UnsupportedModelError(HfPosencError, TypeError):
    """The model's architecture, or a setting of its config, cannot carry another position encoding."""


class PluginError(HfPosencError, ImportError):
    """Another package offers a scheme or a family, but it cannot be loaded from that package."""


class AlreadyPatchedError(HfPosencError, RuntimeError):
    """The model is patched already; unpatch it first."""


class NotPatchedError(HfPosencError, RuntimeError):
    """The model is not patched."""


class CheckpointError(HfPosencError, ValueError):
    """A checkpoint's entry or weights do not fit its scheme, or the checkpoint does not fit the request."""
