"""Episodes: a model and an environment take turns, and the environment rewards the model."""
