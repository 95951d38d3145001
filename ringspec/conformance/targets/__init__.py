"""The targets that ringspec includes. Their dependencies are optional, and are imported only when a target is used."""
