"""Generation of the samples of a step."""
