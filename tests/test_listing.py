"""Names in messages."""

import pytest

from quads_ops.listing import first_names


@pytest.mark.parametrize(
    ("names", "shown"), [([], ""), (["a"], "a"), (("a", "b"), "a, b"), (["a", "b", "c", "d"], "a, b and 2 more")]
)
def test_the_first_names_and_how_many_more(names, shown):
    assert first_names(names, 2) == shown
