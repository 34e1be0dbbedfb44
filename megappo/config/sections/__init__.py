"""Settings of the sections of the YAML file, one module per section."""
