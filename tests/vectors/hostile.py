"""How the refusal of a set is checked."""

import pytest
from refusals import is_refusal

from ringspec.errors import RingspecError
from ringspec.vectors import check_set


def refused(root, expected, call=check_set):
    with pytest.raises(RingspecError) as caught:
        call(root)
    error = caught.value
    assert is_refusal(error, expected), repr(error)
    assert all(part.strip() for part in (error.expected, error.got, error.fix))
    assert len(str(error)) < 2000
    return error
