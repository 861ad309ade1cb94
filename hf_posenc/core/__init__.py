"""What every room may know: positions, calls, forms, modules and the registries. No transformers, no architectures."""
