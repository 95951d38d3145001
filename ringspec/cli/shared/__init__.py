"""Code that several commands share: options, inputs, output, progress, ranks."""
