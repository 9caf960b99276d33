"""Benchmarks: how fast a step is, beside the machine's own limits and beside other frameworks."""
