"""The commands, one file each; the work of long ones is in a second file."""
