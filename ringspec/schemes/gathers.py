"""Constructors that gather one side instead of sending it round a ring.

``all_gather``  the keys of all ranks, along the axis ``cp``; dk and dv return by ``reduce_scatter``
``pcp``         prefill: the same with a cached prefix of keys, forward only, along the axis ``pcp``
``dcp``         decode: keys stay where they are cached; the query heads of the group are gathered along ``dcp``, and
                the softmax states are merged on the way home, by ``reduce_scatter``

In ``dcp``, tensor parallelism along ``tp`` splits the heads into groups, and the ranks of a group split the tokens of the
cache. So all query heads of a group must use key heads that every rank of the group holds.

Sources: Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2; Bhatia et al., Helix Parallelism,
https://arxiv.org/abs/2507.07120; vLLM's decode context parallelism.
"""

from __future__ import annotations

from dataclasses import replace

from ringspec.errors import OptionError
from ringspec.schemes.mesh import Mesh
from ringspec.schemes.rings import Tables, home
from ringspec.schemes.scheme import Scheme, Step, Tokens, Transfer, idle
from ringspec.schemes.sharding import by_tables, check_heads, group_tokens, head_slice, key_heads_of


def all_gather(
    mesh: Mesh,
    tables: Tables,
    tables_k: Tables | None = None,
    *,
    heads: int,
    kv_heads: int,
    axis: str = "cp",
    name: str = "all_gather",
) -> Scheme:
    """Return the scheme that gathers all keys along ``axis`` before anything is computed.

    Rank r holds queries tables[r] and keys tables_k[r] (None: the same tokens). The gathered keys lie in the order of
    tokens.

    >>> scheme = all_gather(Mesh((("cp", 2),)), [[0], [1]], heads=1, kv_heads=1)
    >>> scheme.forward[0].transfers[0].to.shards[0].tokens
    (0, 1)
    """
    home_q = home(mesh, tables, heads)
    home_k = home(mesh, tables if tables_k is None else tables_k, kv_heads)
    everything = home(mesh, group_tokens(home_k, mesh, axis), kv_heads)
    gather = idle(Transfer("k", "all_gather", axis, everything))
    back = Step(transfers=(Transfer("dk", "reduce_scatter", axis, home_k),))
    return Scheme(
        name, mesh, heads, kv_heads, home_q, home_k, home_q, (gather, Step()), (gather, back)
    )


def pcp(mesh: Mesh, tables: Tables, tables_k: Tables, *, heads: int, kv_heads: int) -> Scheme:
    """Return the scheme of a prefill: rank r holds new queries tables[r], and the cached and new keys tables_k[r].

    >>> scheme = pcp(Mesh((("pcp", 2),)), [[0], [1]], [[0, 2], [1, 3]], heads=1, kv_heads=1)
    >>> scheme.backward is None
    True
    """
    trained = all_gather(
        mesh, tables, tables_k, heads=heads, kv_heads=kv_heads, axis="pcp", name="pcp"
    )
    return replace(trained, backward=None)


def dcp(
    mesh: Mesh,
    queries: int,
    tables_k: Tables,
    *,
    heads: int,
    kv_heads: int,
    new: Tokens = (),
) -> Scheme:
    """Return the scheme of decoding along the axes ``tp`` (may be missing) and ``dcp``, for ``queries`` new queries.

    tables_k[d] are the keys in the cache of the ranks with coordinate d along ``dcp``; a rank may have none. ``new`` are
    keys that all ranks hold outside the cache: each rank uses them for its own query heads, after the merge. Raises
    OptionError if the query heads cannot be divided or the mesh has no axis ``dcp``.

    >>> scheme = dcp(Mesh((("dcp", 2),)), 1, [[0, 2], [1]], heads=2, kv_heads=1)
    >>> [one.kind for step in scheme.forward for one in step.transfers]
    ['all_gather', 'reduce_scatter']
    """
    if "dcp" not in mesh.names:
        raise OptionError(
            "a mesh with the axis 'dcp' for decoding",
            str(mesh),
            "add the axis 'dcp', of size 1 if nothing is cut along it",
        )
    groups, parts = mesh.size("tp"), mesh.size("dcp")
    check_heads(heads, kv_heads, groups * parts, "tp x dcp")
    at = [(mesh.coordinate(r, "tp"), mesh.coordinate(r, "dcp")) for r in range(mesh.ranks)]
    of_group = [head_slice(heads, t, groups) for t, _ in at]
    own = [head_slice(heads, t * parts + d, groups * parts) for t, d in at]
    rows = [range(queries)] * mesh.ranks
    home_q, wide_q = by_tables(rows, own), by_tables(rows, of_group)
    cached = tuple(tuple(tables_k[d]) for _, d in at)
    key_heads = [key_heads_of(heads_q, heads // kv_heads) for heads_q in of_group]
    home_k = by_tables([(*tokens, *new) for tokens in cached], key_heads)
    gather = idle(Transfer("q", "all_gather", "dcp", wide_q))
    merge: tuple[Transfer, ...] = (Transfer("state", "reduce_scatter", "dcp", home_q),)
    last: tuple[Step, ...] = ()
    if new:
        merge += (Transfer("q", "local", "dcp", home_q),)
        last = (Step(keys=(tuple(new),) * mesh.ranks),)
    steps = (gather, Step(keys=cached, transfers=merge), *last)
    return Scheme("dcp", mesh, heads, kv_heads, home_q, home_k, home_q, steps)
