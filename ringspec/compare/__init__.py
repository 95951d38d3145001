"""Got against truth. Reads plain arrays and never imports the specification."""
