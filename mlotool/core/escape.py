"""Text of anybody's on the terminal."""


def escape(text: str) -> str:
    r"""Return a text with what does not print as escapes: a terminal obeys control characters.

    Example:
        >>> print(escape("\x1b[2Jdone"))
        \x1b[2Jdone
    """
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)
