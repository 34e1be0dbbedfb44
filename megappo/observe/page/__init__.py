"""A page of HTML with all that a run's directory says: curves, times, distributions, samples, settings, warnings."""
