"""Rollouts: the compiled engine, sampling, stop strings, and texts in and out of them."""
