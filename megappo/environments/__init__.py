"""Episodes: a model and an environment speak in turn, and the environment rewards what the model says."""
