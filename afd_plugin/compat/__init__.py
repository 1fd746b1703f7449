"""The only modules, beside the workers, that name upstream internals."""
