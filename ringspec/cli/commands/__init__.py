"""The commands, one file each; long-running work is in a second file."""
