"""The implementation of collectives: groups of ranks, operands, and the meeting that moves the data."""
