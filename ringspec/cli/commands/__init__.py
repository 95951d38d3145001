"""The commands of ``ringspec``, one file each; ``check`` and ``vectors`` have additional files."""
