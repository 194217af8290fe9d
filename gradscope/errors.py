"""The two ways a measurement is refused: the input is at fault, or the instrument does not trust itself."""


class InputError(ValueError):
    """What the user gave cannot be used; one line that says what, where and what to do (the CLI exits with 2)."""


class SelfCheckError(RuntimeError):
    """The engine's numbers differ from plain autograd's on this model; nothing was measured (the CLI exits with 1)."""
