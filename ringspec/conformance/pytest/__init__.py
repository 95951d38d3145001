"""The suite under pytest: the plugin, its options, the cases as tests."""
