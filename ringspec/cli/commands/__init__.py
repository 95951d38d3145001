"""The commands, one file each; long ones have their work in a second file."""
