"""How a test says that something is refused: by its kind, in one line, naming the values at fault."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradscope.errors import InputError


@contextmanager
def refused(*named: object, kind: type[Exception] = InputError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of one line that names these: a file, a flag, a field, a row, a number; not a sentence."""
    with pytest.raises(kind) as caught:
        yield caught
    said = str(caught.value)
    assert "\n" not in said and all(str(name) in said for name in named), (said, named)
