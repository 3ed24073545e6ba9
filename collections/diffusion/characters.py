"""Whether a text is made of characters."""


def check_characters(text: str, name: str = "the text") -> None:
    """Refuse half of a surrogate pair, which JSON and command lines can bring and no tokenizer reads.

    Args:
        text: any.
        name: what it is, in the error.

    Raises:
        ValueError: says where the first half is, counted from 1.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half of a surrogate pair at character {error.start + 1}, which is no text; take it out"
        ) from error
