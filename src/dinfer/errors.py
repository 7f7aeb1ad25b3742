"""Errors for users: each message says what was given and what is allowed. All are `ValueError`s."""


class DinferError(ValueError):
    """Anything the caller can mend: the message is one clear sentence."""


class CheckpointError(DinferError):
    """A folder or file that is not the checkpoint it claims to be, or of a family not supported."""


class UnknownName(DinferError):
    """A name or option that no registry knows; the message gives the near match and the list."""


class RequestError(DinferError):
    """A request that cannot be served: out of range, too long, not allowed for this model."""


class ContextLengthError(RequestError):
    """A prompt and an answer that do not fit into the model's context together.

    prompt_fits: whether a shorter answer would fit.
    """

    def __init__(self, message: str, prompt_fits: bool = False) -> None:
        super().__init__(message)
        self.prompt_fits = prompt_fits

    @classmethod
    def of(cls, fixed: int, blanks: int, context: int) -> "ContextLengthError":
        """For so many given tokens and so many that are to be generated."""
        return cls(
            f"The prompt has {fixed} tokens and {blanks} are to be generated,"
            f" {fixed + blanks} in all; the context of this model is {context}.",
            prompt_fits=fixed < context,
        )


class EngineError(RuntimeError):
    """A valid request that could not be finished: the model or a strategy is at fault."""
