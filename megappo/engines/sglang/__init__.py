"""SGLang servers: start, supervision, weight updates and generation requests."""
