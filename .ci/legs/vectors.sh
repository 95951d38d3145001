# Promises that the files of the golden sets are sound, and that part of core, merge and cp has the same bytes under other
# BLAS kernels, thread counts and SIMD extensions.
set -euo pipefail
.venv/bin/python -c "from ringspec.vectors import check_set; print(len(check_set('core')), 'cases')"
.venv/bin/python -c "from ringspec.vectors import check_set; print(len(check_set('kernel')), 'cases')"
.venv/bin/python -c "from ringspec.vectors import check_set; print(len(check_set('merge')), 'cases')"
.venv/bin/python -c "from ringspec.vectors import check_set; print(len(check_set('cp')), 'cases')"
.venv/bin/python .ci/blas_matrix.py --sample 70
.venv/bin/python .ci/blas_matrix.py --set merge --sample 12
.venv/bin/python .ci/blas_matrix.py --set cp --sample 20
