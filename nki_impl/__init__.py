"""Ring attention kernels in AWS NKI, held to ringspec. This version contains none of them yet.

The package is here so that its name and its place beside ringspec are settled. The kernels, and the
simulator that runs them without a Trainium device, come with a later version.
"""
