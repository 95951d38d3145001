"""Adapters between an implementation and the target protocol: one for each way to be called."""
