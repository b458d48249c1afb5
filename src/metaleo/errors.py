"""The one exception that a user's mistake raises."""


class BadInput(ValueError):
    """Something handed to Metaleo cannot be used; the message is one line that says what and why."""
