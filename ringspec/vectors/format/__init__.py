"""The format of golden vectors: cases, tensors and manifest, with strict reading and writing."""
