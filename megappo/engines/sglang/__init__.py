"""SGLang servers: started, watched, given weights, asked for responses."""
