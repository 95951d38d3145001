"""Readouts: find out, pair of tokens by pair of tokens, what a ring computed, and describe it in sentences.

A *problem* is two calls of a target: the *readout*, with special inputs, and the *proof*, with random ones. What there is,
in the order in which it is read; each imports only what stands before it:

- :mod:`.problem`: the problems, and which of them a target with given claims can run
- :mod:`.faults`: what a ring may do wrong, with words and places
- :mod:`.model`: a model ring that computes with any of these faults
- :mod:`.reading`: what was found out from the results of one problem, as plain data
- :mod:`.search`: the search for the faults that give these results
- :mod:`.conclusion`: the readings of several problems combined, in sentences
- :mod:`.block_words`: these sentences for targets that are no ring of single workers; :mod:`.evidence`: the numbers of the
  picture in a report
- :mod:`.proof`: what is kept of all this: the faults that give the results of the proofs, and that no right problem refutes
"""
