"""Generation: the protocol of an engine, its implementations, and how the settings name one."""
