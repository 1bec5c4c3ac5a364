"""The one exception that the command line turns into a message instead of a traceback."""


class UserError(Exception):
    """Something that the user can put right; its text says what was got, what is allowed and how to fix it."""
