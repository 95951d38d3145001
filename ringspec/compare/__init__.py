"""Compare results with true values. This package reads plain arrays and never imports the specification."""
