"""Shared by several commands: options, inputs, output, progress, ranks."""
