"""Group relative policy optimization in JAX, with the group as the unit of data."""

__version__ = "0.1.0"
