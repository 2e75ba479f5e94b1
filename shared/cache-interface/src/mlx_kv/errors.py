"""What mlx_kv raises beyond ValueError."""


class UnsupportedModelError(ValueError):
    """No layer of a model can be compressed; the message says why, layer by layer."""


class SpecError(ValueError):
    """A method spec that cannot be read, or whose parts do not go together."""


class CacheFileError(ValueError):
    """A saved cache that is damaged, or that belongs to another model, method or version."""
