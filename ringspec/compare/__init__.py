"""Compare results with true values. Reads plain arrays and never imports the specification."""
