"""What pytest must not import here: kernels that need Triton."""

collect_ignore = ["triton_kernels.py"]
