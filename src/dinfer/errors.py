"""Errors for users: each message says what was given and what is allowed. All are `ValueError`s."""


class DinferError(ValueError):
    """Anything the caller can mend: the message is one clear sentence."""


class CheckpointError(DinferError):
    """A folder or file that is not the checkpoint it claims to be, or of a family not supported."""


class UnknownName(DinferError):
    """A name or option that no registry knows; the message gives the near match and the list."""


class RequestError(DinferError):
    """A request that cannot be served: out of range, too long, not allowed for this model."""


class EngineError(RuntimeError):
    """A valid request that could not be finished: the model or a strategy is at fault."""
