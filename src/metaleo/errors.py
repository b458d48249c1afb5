"""Exceptions."""


class BadInput(ValueError):
    """Something handed to Metaleo cannot be used; the message is one line that says what and why.

    Arguments are written as in Python, `way=20`; the command line shows them as flags, `--way 20`.

    Example:
        >>> from metaleo import BadInput, load_data
        >>> try:
        ...     load_data("nowhere.npz")
        ... except BadInput as error:
        ...     print(str(error).split(";")[0])
        nowhere.npz does not exist
    """


class Interrupted(Exception):
    """The run was asked to stop, and has been saved."""
