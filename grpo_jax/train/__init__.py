"""Training: the compiled step, the supervised start, and the loop that a run is."""
