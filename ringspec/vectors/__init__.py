"""Golden vectors: cases whose expected values are correctly rounded, so that their bytes never change.

In reading order: ``case`` and ``check_case`` (what a case says), ``inputs`` (how its inputs are made),
``tensor_table`` (which tensors it has), ``container`` (one case as a directory), ``digest``,
``manifest`` and ``sets`` (many cases with their hashes), ``diff`` and ``export``. ``flags``,
``requires`` and ``catalogue`` say which cases there are, ``generate`` derives their tensors.
``strictjson`` and ``files`` read what comes from outside.
"""

from ringspec.vectors.case import Case, case_from_json, case_to_json
from ringspec.vectors.diff import SetDiff, diff_sets
from ringspec.vectors.export import export_set
from ringspec.vectors.manifest import FORMAT_VERSION
from ringspec.vectors.sets import VectorSet, check_set, open_set, write_set

__all__ = [
    "FORMAT_VERSION",
    "Case",
    "SetDiff",
    "VectorSet",
    "case_from_json",
    "case_to_json",
    "check_set",
    "diff_sets",
    "export_set",
    "open_set",
    "write_set",
]
