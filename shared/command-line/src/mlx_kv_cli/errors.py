"""Errors that are the user's to mend: one line on stderr and exit code 2, never a traceback."""


class UserError(Exception):
    """A request that cannot be met; the message is a sentence that says what to do about it."""
