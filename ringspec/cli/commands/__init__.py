"""The commands of ``ringspec``, one file each; the work of ``check`` and ``vectors`` is in further files."""
