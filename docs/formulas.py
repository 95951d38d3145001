"""The rules of the specification as formulas, for the page that lists them.

Each rule of :mod:`ringspec.spec.rules` has a :class:`Formula`: lines of LaTeX with an explanation of the
symbols; or only words, if a formula would say no more than the sentence. If a formula and the functions
listed with the rule differ, the functions are right.

Common symbols: i a query, j a key, h a query head, b a batch, n a sink of a head; W workers;
logarithms are natural. The LaTeX is limited to matplotlib's mathtext, with which a test parses it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Formula:
    """``lines`` of LaTeX (possibly none), and ``where``: what the symbols mean, or why there is no formula."""

    lines: tuple[str, ...]
    where: str = ""


def formula(*lines: str, where: str = "") -> Formula:
    return Formula(lines, where)


def words(why: str) -> Formula:
    return Formula((), why)


MASKS = {
    "MASK-1": formula(r"pk_j \leq pq_i", where="pq_i and pk_j are the global positions."),
    "MASK-2": formula(
        r"-\mathrm{left} \leq pk_j - pq_i \leq \mathrm{right}",
        where="If a side is None, its inequality is omitted.",
    ),
    "MASK-3": formula(
        r"\mathrm{seg}^q_i = \mathrm{seg}^k_j \geq 0",
        where="The two segments are equal and not negative.",
    ),
    "MASK-4": formula(
        r"\mathrm{min}_i \leq pk_j < \mathrm{max}_i",
        where="`bound_min` and `bound_max` of the row.",
    ),
    "MASK-5": formula(
        r"\mathrm{seg}_t = d \quad (c_d \leq t < c_{d+1})",
        r"\mathrm{seg}_t = -1 \quad (t \geq c_N)",
        where="Token t; `cu_seqlens` is c_0 = 0, .., c_N.",
    ),
    "MASK-6": formula(
        r"M_{bhij} = 1", where="M is the mask that the caller passes, broadcast; 1 means True."
    ),
    "MASK-7": formula(
        r"\mathrm{bias}_{bhij} = -\infty \ \Rightarrow\ s_{ij} = -\infty,\quad p_{ij} = dz_{ij} = 0",
        where="This also holds with a soft cap: s is -inf, not softcap * tanh(-inf).",
    ),
    "MASK-8": formula(
        r"pq_i = i + q_{\mathrm{offset}}, \quad pk_j = j",
        where="i and j count global tokens. If the caller passes arrays of positions, these replace pq and pk.",
    ),
    "MASK-9": formula(
        r"\mathrm{visible}_{ij} = \bigwedge_{\mathrm{terms}} \mathrm{term}_{ij}",
        r"s_{ij} = -\infty \ \mathrm{and}\ p_{ij} = ds_{ij} = dz_{ij} = 0 \quad \mathrm{unless\ visible}",
        where="The terms are those that the caller gives. In addition, both slots must hold a token (LAYOUT-5).",
    ),
}

FORWARD = {
    "FWD-1": formula(
        r"z_{ij} = \mathrm{scale} \cdot \langle q_i, k_j \rangle + \mathrm{bias}_{ij}"
    ),
    "FWD-2": formula(
        r"\mathrm{scale} = \mathrm{fl}_{64}(1 / \sqrt{D})",
        where="fl_64: the real number rounded once to float64.",
    ),
    "FWD-3": formula(
        r"t_{ij} = \tanh(z_{ij} / \mathrm{softcap}), \quad s_{ij} = \mathrm{softcap} \cdot t_{ij}",
        where="Without a soft cap s = z.",
    ),
    "FWD-4": formula(
        r"\mathrm{lse}_i = \log \left( \sum_j \exp(s_{ij}) + \sum_n \exp(\mathrm{sink}_{hn}) \right)",
        where="j runs over all visible keys of the row, on all workers; the second sum exists only with sinks (FWD-5).",
    ),
    "FWD-5": formula(
        r"\exp(\mathrm{lse}_i) = \sum_j \exp(s_{ij}) + \sum_n \exp(\mathrm{sink}_{hn}), \quad "
        r"o_i = \frac{\sum_j \exp(s_{ij}) \, v_j}{\exp(\mathrm{lse}_i)}",
        where="This is the formula without dropout. The sum of a single block does not include the sinks.",
    ),
    "FWD-6": formula(
        r"o_i = \sum_j p_{ij} \frac{\mathrm{keep}_{ij}}{1 - \mathrm{dropout\_p}} \, v_j"
    ),
    "FWD-7": formula(
        r"p_{ij} = \exp(s_{ij} - \mathrm{lse}_i)",
        where="Neither lse nor p contains the factor `keep`.",
    ),
    "FWD-8": formula(
        r"\{j : \mathrm{visible}_{ij}\} = \emptyset, \ N = 0 \quad \Rightarrow \quad o_i = 0, \quad \mathrm{lse}_i = -\infty",
        where="N is the number of sinks of a head.",
    ),
    "FWD-9": formula(
        r"\{j : \mathrm{visible}_{ij}\} = \emptyset, \ N > 0 \quad \Rightarrow \quad o_i = 0, \quad "
        r"\mathrm{lse}_i = \log \sum_n \exp(\mathrm{sink}_{hn})"
    ),
    "FWD-10": formula(
        r"h_{kv} = \lfloor h / G \rfloor, \quad G = H / H_{kv}",
        where="h_kv is the key/value head that query head h reads.",
    ),
}

DROPOUT = {
    "DROP-1": formula(
        r"w_{bhij} = \mathrm{Philox4x32}_{10} \left( (pk_j, pq_i, h, b), \ (\mathrm{seed} \ \mathrm{mod}\ 2^{32}, "
        r"\lfloor \mathrm{seed} / 2^{32} \rfloor) \right)_0",
        where="The first tuple is the counter, the second the key. Each word of the counter is taken modulo 2^32; output word 0 is used.",
    ),
    "DROP-2": formula(
        r"\mathrm{keep}_{bhij} = 1 \ \Leftrightarrow \ w_{bhij} \geq \lfloor \mathrm{dropout\_p} \cdot 2^{32} \rfloor"
    ),
    "DROP-3": formula(
        r"\mathrm{keep}_{bhij} = K_{bhij}",
        where="K is the mask that the caller passes, broadcast; no random word is drawn.",
    ),
}

BACKWARD = {
    "BWD-1": formula(
        r"\delta_i = \langle dy_i, o_i \rangle", where="This also holds with dropout."
    ),
    "BWD-2": formula(
        r"dp_{ij} = \langle dy_i, v_j \rangle \frac{\mathrm{keep}_{ij}}{1 - \mathrm{dropout\_p}}"
    ),
    "BWD-3": formula(
        r"ds_{ij} = p_{ij} \, (dp_{ij} - \delta_i + \mathrm{dlse}_i)",
        where="dlse = dL/dlse; it is 0 if the loss does not depend on lse.",
    ),
    "BWD-4": formula(r"dz_{ij} = ds_{ij} \, (1 - t_{ij}^2)", where="Without a soft cap dz = ds."),
    "BWD-5": formula(r"dq_i = \mathrm{scale} \sum_j dz_{ij} \, k_j"),
    "BWD-6": formula(
        r"dk_j = \mathrm{scale} \sum_{h : \lfloor h / G \rfloor = h_{kv}} \ \sum_i dz_{ij} \, q_i",
        where="q and dz are those of head h; dk is that of key head h_kv.",
    ),
    "BWD-7": formula(
        r"dv_j = \sum_{h : \lfloor h / G \rfloor = h_{kv}} \ \sum_i p_{ij} \frac{\mathrm{keep}_{ij}}{1 - \mathrm{dropout\_p}} \, dy_i",
        where="p, keep and dy are those of head h; dv is that of key head h_kv.",
    ),
    "BWD-8": formula(
        r"\mathrm{dbias}_{\beta} = \sum_{(b, h, i, j) \to \beta} dz_{bhij}",
        where="The sum is over all pairs that use the entry beta of a broadcast bias.",
    ),
    "BWD-9": formula(
        r"\mathrm{dsink}_{hn} = \sum_b \sum_i \exp(\mathrm{sink}_{hn} - \mathrm{lse}_i) \, (\mathrm{dlse}_i - \delta_i)"
    ),
    "BWD-10": formula(
        r"\mathrm{lse}_i = -\infty \quad \Rightarrow \quad p_{ij} = ds_{ij} = dz_{ij} = 0 \ \ \forall j, \quad dq_i = 0",
        where="Such a row also adds 0 to every dk, dv, dbias and dsink.",
    ),
    "BWD-11": formula(
        r"p_{ij} = \exp(s_{ij} - \mathrm{lse}_i), \quad ds_{ij} = p_{ij} \, (dp_{ij} - \mathrm{row\_term}_i)",
        where="lse and row_term = delta - dlse are arguments (RING-7); the p of a row in one block need not add up to 1.",
    ),
}

SOFTMAX = {
    "SOFT-1": formula(
        r"m = \max(m_a, m_b), \quad l = e^{m_a - m} l_a + e^{m_b - m} l_b, \quad o = e^{m_a - m} o_a + e^{m_b - m} o_b",
        where="a and b are two states over disjoint keys; o is not normalised. When a tile is absorbed, the tile is b.",
    ),
    "SOFT-2": formula(
        r"(-\infty, 0, 0) \oplus (-\infty, 0, 0) = (-\infty, 0, 0), \quad \mathrm{lse} = m + \log l = -\infty",
        where="States are (m, l, o). The weight of an empty state is 0, never exp(-inf + inf).",
    ),
    "SOFT-3": formula(
        r"\mathrm{lse} = \log \sum_n e^{\mathrm{lse}_n}, \quad o = \sum_n e^{\mathrm{lse}_n - \mathrm{lse}} \, o_n",
        where="n counts the parts, whose o_n are normalised.",
    ),
    "SOFT-4": formula(
        r"m_a - \max(m_a, m_b) \leq 0, \quad m_b - \max(m_a, m_b) \leq 0",
        where="For normalised parts, the same holds with lse_n in place of m.",
    ),
}

LAYOUTS = {
    "LAYOUT-1": formula(
        r"T_{r,t} = r n + t, \quad n = S / W",
        where="T[r, t] is the token in slot t of worker r, 0 <= t < n.",
    ),
    "LAYOUT-2": formula(r"T_{r,t} = t W + r", where="0 <= t < S/W."),
    "LAYOUT-3": formula(
        r"T_{r,t} = r c + t \quad (0 \leq t < c)",
        r"T_{r,t} = (2W - 1 - r) \, c + (t - c) \quad (c \leq t < 2c), \quad c = S / (2W)",
    ),
    "LAYOUT-4": formula(
        r"T_{r} = [\, f_0 + Z^{(0)}_{r}, \ f_1 + Z^{(1)}_{r}, \ \ldots \,], \quad c_d = \lceil L_d / (2W) \rceil",
        where="Document d has L_d tokens from token f_d on; Z^(d) is the table of LAYOUT-3 with chunks of c_d. Entries of "
        "Z^(d) from L_d on are padding, -1. Tokens after the last document are distributed like one more document.",
    ),
    "LAYOUT-5": formula(
        r"|\{(r, t) : T_{r,t} = x\}| = 1 \ \ (0 \leq x < S), \quad T_{r,t} < 0 \ \Rightarrow \ \mathrm{not\ visible}",
        where="A slot without a token is visible neither as a query nor as a key.",
    ),
    "LAYOUT-6": formula(
        r"y_{r}[t] = x_{r'}[t'], \quad r' = (r n + t) \ \mathrm{mod}\ W, \quad t' = \lfloor (r n + t) / W \rfloor",
        where="x is striped, y is contiguous; each worker has n = S/W tokens.",
    ),
    "LAYOUT-7": formula(
        r"Y_{b, h, \, t \ \mathrm{mod}\ 128, \, \lfloor t / 128 \rfloor} = \mathrm{lse}_{b, h, t}"
    ),
    "LAYOUT-8": formula(
        r"T_{r} = [\, f_0 + Z^{(0)}_{r}, \ f_1 + Z^{(1)}_{r}, \ \ldots \,], \quad c_d = N_d / (2W)",
        where="Document d has L_d tokens from token f_d on, in N_d slots; Z^(d) is the table of LAYOUT-3 with chunks of c_d. "
        "Entries of Z^(d) from L_d on are padding, -1.",
    ),
    "LAYOUT-9": formula(
        r"r = \lfloor i / I \rfloor \ \mathrm{mod}\ W, \quad t = \lfloor i / (W I) \rfloor \, I + i \ \mathrm{mod}\ I",
        where="i is the offset of a token in its document, r its worker and t its slot in the document's slots.",
    ),
    "LAYOUT-10": formula(
        r"L_r(n) = \lfloor n / (W I) \rfloor \, I + \min(\max(n \ \mathrm{mod}\ (W I) - r I, \ 0), \ I)"
    ),
    "LAYOUT-11": formula(
        r"\mathrm{position}(x) = x - f_d + \mathrm{prefix}_d",
        where="Token x belongs to document d, which begins with token f_d.",
    ),
    "LAYOUT-12": formula(r"C_{r,d} = |\{t : 0 \leq T_{r,t} < f_d\}|"),
    "LAYOUT-13": formula(
        r"\mathrm{visible}_r(p) = |\{i : \lfloor i / I \rfloor \ \mathrm{mod}\ W = r, \ i \leq p\}| = L_r(p + 1)"
    ),
}

RING = {
    "RING-1": formula(
        r"b(r, t) = (r - \sigma t) \ \mathrm{mod}\ W",
        where="sigma = 1 if worker r sends to r + 1, as in the sentence, and -1 if it sends to r - 1.",
    ),
    "RING-2": formula(
        r"|\{(r, t) : \mathrm{pair}(r, t) = (a, b)\}| = 1 \quad \forall\, a, b \in \{0, \ldots, W - 1\}",
        where="pair(r, t) is the owner of the queries and the owner of the keys that worker r computes with in step t. For a "
        "pair that is declared as skipped (RING-11), the number is 0.",
    ),
    "RING-3": formula(
        r"\{\mathrm{sources}\} = \{\mathrm{targets}\} = \{0, \ldots, W - 1\}",
        where="Each worker occurs exactly once in each.",
    ),
    "RING-4": formula(
        r"\mathrm{hops}(\mathrm{inputs}) = W - 1, \quad \mathrm{hops}(\mathrm{accumulators}) = W, \quad (r + \sigma W) \ \mathrm{mod}\ W = r",
        where="The last equation: accumulators that start at worker r return to it. sigma is as in RING-1.",
    ),
    "RING-5": formula(
        r"\mathrm{hops}(dq) = \mathrm{hops}(\mathrm{dbias}) = W, \quad \mathrm{hops}(dk) = \mathrm{hops}(dv) = 0"
    ),
    "RING-6": words(
        "No formula: the terms MASK-1 to MASK-9 read the positions, segments, bounds and bias that belong to the "
        "owners of the two blocks, never those of the worker that computes."
    ),
    "RING-7": formula(
        r"ds_{ij} = p_{ij} \, (dp_{ij} - \gamma_i), \quad \gamma_i = \delta_i - \mathrm{dlse}_i",
        where="gamma is the one number per row that travels.",
    ),
    "RING-8": formula(
        r"j \leq i + a \, n_q - b \, n_k + q_{\mathrm{offset}}",
        where="For queries of worker a and keys of worker b; i and j count from the start of their blocks.",
    ),
    "RING-9": formula(
        r"j \leq i + \left\lfloor \frac{a + q_{\mathrm{offset}} - b}{W} \right\rfloor",
        where="This follows from j W + b <= i W + a + q_offset; i and j are local.",
    ),
    "RING-10": formula(
        r"j \leq i + c \, \frac{n_q}{2} - d \, \frac{n_k}{2} + q_{\mathrm{offset}}",
        r"c \in \{a, \ 2W - 1 - a\}, \quad d \in \{b, \ 2W - 1 - b\}",
        where="For chunk c of the queries and chunk d of the keys; i and j count from the start of their chunks.",
    ),
    "RING-11": formula(
        r"(a, b) \ \mathrm{skipped} \quad \Rightarrow \quad \mathrm{visible}_{ij} = 0 \ \ \forall\, i \in a, \ j \in b"
    ),
    "RING-12": formula(
        r"\mathrm{dsink}^{(r)}_{hn} = \sum_b \sum_{i \in r} \exp(\mathrm{sink}_{hn} - \mathrm{lse}_i) \, (\mathrm{dlse}_i - \delta_i), \quad "
        r"\mathrm{dsink} = \sum_r \mathrm{dsink}^{(r)}",
        where="i runs over the rows of worker r. dbias is summed likewise; it covers all global keys.",
    ),
    "RING-13": formula(
        r"\mathrm{lse}_i = \log \left( \sum_{b} \sum_{j \in b} \exp(s_{ij}) + \sum_n \exp(\mathrm{sink}_{hn}) \right), \quad "
        r"\delta_i = \langle dy_i, o_i \rangle",
        where="The first sum is over the blocks b of all workers. This lse, and the o of the whole row, enter the backward "
        "pass of each single block.",
    ),
}

SCHEMES = {
    "CP-1": formula(
        r"\mathrm{sent}(a \rightarrow b) = S_a \cap T_b \quad (a \neq b)",
        where="S_a are the cells (token, head) that rank a holds before, T_b those that rank b holds afterwards; a and b are "
        "in one group along the axis. An input is sent once to a rank that does not have it.",
    ),
    "CP-2": formula(
        r"n_c(i, h, j) = \mathrm{visible}_{hij}",
        where="n_c counts how often the result of a copy c contains query i and key j of head h. c is of row i of head h for o "
        "and dq, and of key j of head h // G for dk and dv. visible is 1 or 0.",
    ),
    "CP-3": formula(
        r"dk_j = \sum_r dk^{(r)}_j, \quad o_i = \sum_r \exp(\mathrm{lse}^{(r)}_i - \mathrm{lse}_i) \, o^{(r)}_i",
        where="r runs over the ranks with a partial result for the cell; dq and dv are added like dk.",
    ),
    "CP-4": formula(
        r"K_r \supseteq \{\lfloor h / G \rfloor : h \in H_r\}",
        where="H_r are the query heads with which rank r computes, K_r its key heads; G = H / Hkv.",
    ),
    "CP-5": formula(
        r"|\{t : x \in \mathrm{keys}(r, t)\}| = 1, \quad dk_x = \sum_r dk^{(r)}_x",
        where="x is a text token, t a step of the ring, r a ring coordinate. In the backward pass, the rows of one coordinate "
        "alone contain x.",
    ),
    "CP-6": formula(r"\mathrm{merge}(x, (o = 0, \mathrm{lse} = -\infty)) = x"),
}

NUMBERS = {
    "NUM-1": formula(
        r"|\mathrm{fl}(x) - x| = \min_{y \in F} |y - x|",
        where="F is the set of numbers of the format, without an upper limit on the exponent. Of two equally near numbers, "
        "the one whose last bit is 0 is taken. A result beyond the largest number of the format becomes infinity, or NaN in "
        "a format without infinity.",
    ),
    "NUM-2": words(
        "No formula: a recipe names a format for each rounding point; every other value stays float64."
    ),
    "NUM-3": formula(
        r"o = \mathrm{fl}_c \left( \mathrm{fl}_m \left( \mathrm{fl}_m(c_a o_a) + \mathrm{fl}_m(c_b o_b) \right) \right)",
        r"c_a = \mathrm{fl}_s(e^{m_a - m}), \quad c_b = \mathrm{fl}_s(e^{m_b - m}), \quad l = \mathrm{fl}_s(c_a l_a + c_b l_b)",
        where="fl_m, fl_s and fl_c round at the points `merge`, `statistics` and `carried_o` of the recipe. For normalised "
        "parts c_n = fl_s(e^(lse_n - lse)), and lse takes the place of l.",
    ),
}

FORMULAS: dict[str, Formula] = {
    **MASKS, **FORWARD, **DROPOUT, **BACKWARD, **SOFTMAX, **LAYOUTS, **RING, **SCHEMES,
    **NUMBERS,
}  # fmt: skip

# What the docstring of ringspec.spec.essence states as text, in its order.
ESSENCE = (
    r"s_{ij} = \frac{1}{\sqrt{D}} \langle q_i, k_j \rangle \quad \mathrm{if\ key}\ j\ \mathrm{is\ visible\ to\ query}\ i,"
    r"\ \mathrm{else}\ -\infty",
    r"\mathrm{lse}_i = \log \sum_j e^{s_{ij}} \qquad p_{ij} = e^{s_{ij} - \mathrm{lse}_i} \qquad o_i = \sum_j p_{ij} v_j",
    r"dy = \frac{\partial L}{\partial o} \qquad \delta_i = \langle dy_i, o_i \rangle"
    r" \qquad ds_{ij} = p_{ij} (\langle dy_i, v_j \rangle - \delta_i)",
    r"dq_i = \frac{1}{\sqrt{D}} \sum_j ds_{ij} k_j \qquad dk_j = \frac{1}{\sqrt{D}} \sum_i ds_{ij} q_i"
    r" \qquad dv_j = \sum_i p_{ij} dy_i",
)
