"""The operators of ``nki.language``: as operands of instructions, and as functions of tiles."""
