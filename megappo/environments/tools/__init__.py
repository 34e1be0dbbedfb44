"""Tools of a model: parsing of calls, and confined worker processes."""
