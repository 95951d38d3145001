"""Readouts: find out, pair of tokens by pair of tokens, what a ring computed, and describe it in sentences.

The folders, in the order in which they are read; each imports only those before it:

- :mod:`.problem`: the problems whose results show what a ring computed, and for which targets they exist
- :mod:`.faults`: what a ring may do wrong, with words and places
- :mod:`.model`: a model ring that computes with any of these faults
- :mod:`.search`: the search for the faults that give the results of one problem; :mod:`.reading` is what it returns
- :mod:`.proof`: the proof by other calls, and what all problems of a target show together

:mod:`.told` puts readings into sentences, :mod:`.block_words` those of targets without a ring, and :mod:`.evidence` draws
the picture of a report.
"""
