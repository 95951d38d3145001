"""The conformance suite: point it at any implementation and get an honest verdict."""
