"""Golden vectors: cases whose expected values are correctly rounded, so that their bytes never change.

A case is a small attention problem. Its tensors are derived from a description, case.json. In reading order:

``format``     the file format: the fields of a case (``case``), how its inputs are made (``inputs``), which tensors it
               has (``tensor_table``), one case as a directory (``container``), and the list of a set's files with
               their hashes (``manifest``)
``catalogue``  the existing cases, and the classes of bugs that they detect (``flags``)
``generate``   the derivation of all tensors of a case; ``merge_bits`` has that of merges, ``scheme_tables`` that of
               attention split over ranks
``sets``       sets of cases: open, check, compare, and cache what is not stored
``verify``     a second derivation, compared with the stored bytes
``make``       golden values for your own problem
``export``     a set as one archive
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
