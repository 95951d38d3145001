"""Pairwise covering: few combinations in which every pair of values of any two factors occurs."""

import itertools


def covering(factors: dict[str, list], start: list[dict] | None = None) -> list[dict]:
    """Greedy all-pairs rows over ``factors``; deterministic.

    >>> rows = covering({"a": [1, 2], "b": [3, 4], "c": [5, 6]})
    >>> len(rows) < 8, {(r["a"], r["c"]) for r in rows} == {(1, 5), (1, 6), (2, 5), (2, 6)}
    (True, True)
    """
    names = list(factors)
    index = {name: range(len(factors[name])) for name in names}
    missing = {
        (one, i, two, j)
        for one, two in itertools.combinations(names, 2)
        for i in index[one]
        for j in index[two]
    }
    rows = []
    while missing:
        one, i, two, j = min(missing)
        row = {one: i, two: j}
        for name in names:
            if name not in row:
                row[name] = max(
                    index[name], key=lambda value: (gain(missing, row, name, value), -value)
                )
        for a, b in itertools.combinations(names, 2):
            missing.discard((a, row[a], b, row[b]))
        rows.append({name: factors[name][row[name]] for name in names})
    return rows


def gain(missing: set, row: dict, name: str, value: int) -> int:
    """How many missing pairs this value would cover with what the row holds already."""
    return sum(
        (other, chosen, name, value) in missing or (name, value, other, chosen) in missing
        for other, chosen in row.items()
    )
