"""The reward of `megappo guide gae`."""


def digit(response: str) -> float:
    """Return 1 if the response begins with a digit. The critic knows the reward after the first token."""
    return float(response[:1].isdigit())
