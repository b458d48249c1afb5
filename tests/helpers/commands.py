"""Commands as a user types them."""

import json

import pytest

from metaleo.cli import main

SMALL = (
    "--learner", "leo", "--way", "3", "--query", "4", "--steps", "4", "--meta-batch", "2", "--validate-every", "2",
    "--validation-tasks", "4", "--latent", "4", "--latent-steps", "1", "--finetune-steps", "1",
)  # fmt: skip
"""Flags of `metaleo train` for a run of a moment."""


def fails(capsys, *arguments):
    """The one line that a command says before it gives up with code 2."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1, said
    return said


def told(capsys, *words):
    """What a command prints as JSON, of which NaN is no part."""
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
