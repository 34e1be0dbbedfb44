"""The reward of the example run in megappo/guides/gae.md, which checks the first character of an answer."""


def digit(response: str) -> float:
    """Return 1 if the response begins with a digit, otherwise 0. The critic can predict the reward after the first
    token."""
    return float(response[:1].isdigit())
