"""`megappo doctor`: checks of a machine, its software and its links; each is fine, slow or broken, with a remedy."""
