"""`megappo doctor`: what of a machine, its software and its links is fine, slow or broken, and what to do."""
