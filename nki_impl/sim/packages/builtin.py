"""``nki.builtin``, which AWS's tests import and do not use."""
