"""Golden vectors: cases whose expected values are correctly rounded, so that their bytes never change.

In reading order: ``case`` and ``check_case`` (the fields of a case), ``inputs`` (how the inputs of a case are made),
``tensor_table`` (which tensors a case has), ``container`` (one case as a directory), ``digest``,
``manifest`` and ``sets`` (many cases with their hashes), ``diff`` and ``export``. ``flags``,
``requires`` and ``catalogue`` define the existing cases, and ``generate`` derives their tensors.
``json_text`` and ``files`` read untrusted input.
"""

from ringspec.vectors.export import export_set
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.case_json import case_from_json, case_to_json
from ringspec.vectors.format.manifest import FORMAT_VERSION
from ringspec.vectors.sets.diff import SetDiff, diff_sets
from ringspec.vectors.sets.stored import VectorSet, check_set, open_set, write_set

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
