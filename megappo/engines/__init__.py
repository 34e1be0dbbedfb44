"""Generation: the engine protocol, its implementations, and the selection of an engine from the settings."""
