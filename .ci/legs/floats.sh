# Every test whose outcome can depend on floating point, under OpenBLAS's Nehalem, Haswell and SkylakeX kernels, with one
# and two threads, and with NumPy's SIMD dispatch off. The leg `tests` runs all tests on the machine as it is.
set -euo pipefail
.venv/bin/python .ci/float_tests.py
