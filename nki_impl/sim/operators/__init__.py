"""The operators of ``nki.language``, such as ``nl.add``, as arguments of instructions and as functions of tiles."""
