"""Tools for live models: describe them, watch their layers, change them and undo it, and find wrappers around them."""
