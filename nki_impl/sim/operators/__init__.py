"""The operators of ``nki.language``, as arguments of instructions and as functions of tiles."""
