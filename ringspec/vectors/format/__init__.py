"""The format of golden vectors: case, tensors, manifest, strict reading and writing."""
