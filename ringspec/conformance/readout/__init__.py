"""Readouts: find out, pair of tokens by pair of tokens, what a ring computed, and describe it in sentences."""
