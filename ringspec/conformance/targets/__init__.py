"""The targets (implementations under test) that ringspec includes.

Their dependencies are optional, and are imported only when a target is used.
"""
