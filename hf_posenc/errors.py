"""The errors of the package. Each also derives from the built-in error a caller would expect."""


class HfPosencError(Exception):
    """Base of every error this package raises on purpose, wrong hyper-parameters (TypeError, ValueError) excepted."""


class UnknownSchemeError(HfPosencError, ValueError):
    """The scheme's name is not registered."""


class UnsupportedModelError(HfPosencError, TypeError):
    """The model's architecture, or a setting of its config, cannot carry another position encoding."""


class PluginError(HfPosencError, ImportError):
    """Another package offers a scheme or a family by this name, and it cannot be had from there."""


class AlreadyPatchedError(HfPosencError, RuntimeError):
    """The model already carries a scheme; unpatch it first."""


class NotPatchedError(HfPosencError, RuntimeError):
    """The model carries no scheme of this package."""


class CheckpointError(HfPosencError, ValueError):
    """A checkpoint's entry or weights are not what its scheme needs, or it cannot be what was asked for."""


class WeightShapeError(CheckpointError, RuntimeError):
    """A weight has another shape than the config asks for; a RuntimeError too, as it is in transformers."""
