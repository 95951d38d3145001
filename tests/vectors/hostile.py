"""How the refusal of a set is checked."""

import pytest

from ringspec.errors import RingspecError
from ringspec.vectors import check_set


def refused(root, error_class, call=check_set):
    with pytest.raises(RingspecError) as caught:
        call(root)
    error = caught.value
    assert type(error) is error_class, repr(error)
    assert all(part.strip() for part in (error.expected, error.got, error.mend))
    assert len(str(error)) < 2000
    return error
