"""The one exception that means "the user can mend this"."""


class UserError(ValueError):
    """Bad input: the message is one sentence that says what is wrong and how to mend it.

    The command line prints the message alone and exits with code 2.
    """
