"""Errors a user can act on. The CLI prints their message without a traceback and exits with code 2."""


class UserError(Exception):
    """Something the user must change; the message says what was found, the rule, and what to do."""


class ConfigError(UserError):
    """A recipe or command-line value that breaks a rule; quotes the dotted key, the value and the rule."""


class DataError(UserError):
    """A question file that cannot be used; quotes the path and, where there is one, the line."""


class CheckpointError(UserError):
    """A checkpoint, model folder or experience file that is missing, damaged, or of another run."""


class LostRankError(UserError):
    """Another process of the run ended while this one waited for it; why, that one has said."""
