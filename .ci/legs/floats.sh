# Promises that tests whose outcome can depend on floating point pass under OpenBLAS's Nehalem, Haswell and SkylakeX
# kernels, with one and two threads, and with NumPy's SIMD dispatch off. The arrangement that the machine chooses by itself,
# with one thread, is that of the leg `tests` and is not repeated.
set -euo pipefail
.venv/bin/python .ci/float_tests.py
