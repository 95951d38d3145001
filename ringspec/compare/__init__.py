"""Compare results with true values. This package works on plain arrays and never imports ``ringspec.spec``."""
