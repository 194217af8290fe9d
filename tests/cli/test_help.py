"""Help that can be acted on: examples that parse, no reference to another page, no empty default."""

import re
import shlex

import pytest

from gradscope.cli.commands import COMMANDS, EXAMPLES, _parse

OF_A_CONFIG = {"train": 2}
"""Fields without a hint of their own, of TrainConfig."""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse_and_refers_to_nothing_else(command, capsys):
    with pytest.raises(SystemExit) as ended:
        _parse([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and "README" not in text and text.count("(default: )") <= OF_A_CONFIG.get(command, 0)
    assert EXAMPLES[command]
    for example in EXAMPLES[command]:
        given = [word.replace("*", "500") for word in shlex.split(example)]
        assert type(_parse([command, *given])).__name__ == command.capitalize()
        assert all(word in text for word in re.findall(r"--[a-z-]+", example))
