"""Writer of a first configuration for the current machine (`megappo init`)."""
