"""What the tests of the engines share. They run in an environment of their own: `make engines`."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """The directory of the zoo's language model, fetched once."""
    from sparge_tools import zoo

    return zoo.fetch("smollm2-135m-instruct", quiet=True)


@pytest.fixture(scope="session")
def essay(smollm2):
    """The tokens of a long English text."""
    from transformers import AutoTokenizer

    from sparge_tools import zoo

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return tokenizer(zoo.text("essays")[:60000])["input_ids"]
