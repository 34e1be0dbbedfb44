"""HTML page of a run directory: curves, times, distributions, samples, settings and warnings."""
