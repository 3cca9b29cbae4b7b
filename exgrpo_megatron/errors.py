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
    """Another process of the run ended while this one waited for it.

    `killed` are the ranks on this machine whose process is gone without a word; where there are none, the one that
    ended is about to say why, or ran on another machine.
    """

    def __init__(self, message: str, killed: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.killed = killed
