"""The implementation of collectives: groups of ranks, operands, and the meeting at which data is moved."""
