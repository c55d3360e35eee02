"""The one exception a user's mistake raises: its message is the whole story, in one line."""


class UserError(ValueError):
    """Says what was found and what would work. The command line prints it without a traceback and exits with 2."""
