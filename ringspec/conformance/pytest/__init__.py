"""The suite under pytest: the plugin with its options, and the cases as tests."""
