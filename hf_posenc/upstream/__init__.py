"""The rooms of the package that know transformers' internals: attention, masks and rotary modules."""
