"""What a ring computed, pair by pair, read from one problem and described in sentences."""
