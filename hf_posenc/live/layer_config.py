"""A config for one attention, with other `rope_parameters` than the model's."""

from __future__ import annotations

from typing import Any


class LayerConfig:
    """A view of a model's config for one attention. Only some `rope_parameters` differ."""

    def __init__(self, whole: object, **parameters: object) -> None:
        """Make a view of a config.

        Args:
            whole: the model's config. Later changes of it show in the view.
            **parameters: keys of `rope_parameters`, with this attention's values.
        """
        self.__dict__.update(whole=whole, parameters=parameters)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The model's `rope_parameters`, with this attention's values."""
        return {**self.whole.rope_parameters, **self.parameters}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model's config."""
        if name in ("whole", "parameters"):  # a copy that is being made lacks them
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute of the model's config."""
        setattr(self.whole, name, value)
