"""Why positions work: what a scheme or a model does with them, as numbers (and, in `plots`, as pictures)."""
