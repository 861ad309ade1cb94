"""A config that one attention reads in place of its model's."""

from __future__ import annotations

from typing import Any


class LayerConfig:
    """A model's config as one of its attentions sees it: with other `rope_parameters`, and all else the model's."""

    def __init__(self, whole: Any, **parameters: Any) -> None:
        """Stand in front of a config.

        Args:
            whole: of the model; what it says later is seen here too.
            **parameters: values of keys of `rope_parameters`.
        """
        self.__dict__.update(whole=whole, parameters=parameters)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The model's, with the values of this layer."""
        return {**self.whole.rope_parameters, **self.parameters}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model's config."""
        if name in ("whole", "parameters"):  # not there yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model's config."""
        setattr(self.whole, name, value)
