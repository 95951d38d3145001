"""The targets that ringspec includes. Their dependencies are optional, and imported when a target is used."""
