"""Entry points of AWS's packages that are not public, as far as AWS's kernels and their tests use them.

``simulator``: the package ``nki_cpu_simulator``. ``neuron_dtypes``: the package of that name. ``frontend``: names of
``nki.compiler.frontend``. ``modules`` puts them together. None of it is AWS's code: the call sites in
https://github.com/aws-neuron/nki-library, branch 2.29_release, show what each name must do.
"""
