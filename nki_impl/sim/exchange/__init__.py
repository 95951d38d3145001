"""How collectives happen: groups of ranks, operands, and the meeting that moves the data."""
