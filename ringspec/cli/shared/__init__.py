"""What several commands use: options, inputs, output, progress, ranks."""
