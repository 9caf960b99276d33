"""Optimizers: the Optax chain built from the configuration."""
