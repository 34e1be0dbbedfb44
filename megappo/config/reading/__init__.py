"""The YAML parser, and error messages for invalid settings."""
