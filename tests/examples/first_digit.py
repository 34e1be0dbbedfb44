"""The reward of the worked run of megappo/guides/gae.md: whether an answer begins with a digit."""


def digit(response: str) -> float:
    """1 where it does, which the critic knows once it has seen the first token."""
    return float(response[:1].isdigit())
