// Ways to split attention: a box for each rank, with the tokens and heads that it holds of each thing.
const PIXEL = TOKENS > 32 ? 3.5 : 5.5; // of a cell, one token of one head
const NAME_WIDE = 52;
const THINGS = {
  forward: [["q", true], ["k v", false], ["m l o", true], ["o lse", true]],
  backward: [["q", true], ["k v", false], ["dq", true], ["dk dv", false]],
};
const sums = (name) => !["q", "k v"].includes(name);

function schemeScene() {
  const home = D.schemes[state.scheme];
  const run = D.runs[`${state.scheme}/${state.mask}`][state.pass];
  if (!run) return null;
  const head = Number(state.head);
  const ofKey = Math.floor(head / (D.problem.heads / D.problem.kv_heads));
  const visible = D.visible[`${state.scheme}/${state.mask}`];
  const owner = ownersOf(home.keys, ofKey, 0);
  return {
    run, home, head, ofKey, visible, owner, ring: undefined,
    queryOwner: ownersOf(home.queries, head, home.offset),
    table: home.queries.map(([tokens]) => tokens.map((token) => token + home.offset)),
    steps: run.used.length, workers: home.queries.length, t: state.step,
    atEnd: state.step === run.used.length,
    travel: {name: `${state.scheme}, ${state.pass}`, sends: run.moves},
    pairs: (t, rank) => pairsOfRank(run, t, rank, head, home.offset, visible),
    computes: (rank) => computes(run.used[state.step]?.[rank]),
  };
}

// The lowest rank that holds each token of a head at home, by position; -1 where there is none.
function ownersOf(shards, head, offset) {
  const owner = Array(TOKENS).fill(-1);
  shards.forEach(([tokens, heads], rank) => tokens.forEach((token) => {
    if (heads.includes(head) && owner[token + offset] < 0) owner[token + offset] = rank;
  }));
  return owner;
}

function pairsOfRank(run, t, rank, head, offset, visible) {
  const used = run.used[t][rank];
  if (!used || !used[0][1].includes(head)) return [];
  return used[0][0].flatMap((i) =>
    used[1][0].filter((j) => visible[i][j] === "1").map((j) => [i + offset, j]));
}

function computes(used) {
  if (!used) return "\u2013";
  const [[q, heads], [k]] = used;
  return `${q.length} queries \u00d7 ${k.length} keys, heads ${runs(heads)}`;
}

// Ranks in rows of the outer axis; with one axis, in two columns.
function rankPlaces(now, wide, high) {
  const axes = now.home.mesh;
  const columns = axes.length > 1 ? axes[axes.length - 1][1] : Math.min(2, now.workers);
  return range(now.workers).map((rank) => [
    4 + (rank % columns) * (wide + 22), 4 + Math.floor(rank / columns) * (high + 22)]);
}

function showRanks(now) {
  const rows = THINGS[state.pass].map(([name, ofQuery]) =>
    [name, ofQuery, (ofQuery ? D.problem.heads : D.problem.kv_heads) * PIXEL]);
  const wide = NAME_WIDE + TOKENS * PIXEL + 10;
  const high = 46 + sum(rows.map(([, , size]) => size + 7));
  const at = rankPlaces(now, wide, high);
  const lines = now.atEnd ? [] : now.run.moves[now.t].flatMap((one) => one.messages).map(([a, b]) =>
    svg("line", {class: "arrow busy", x1: at[a][0] + wide / 2, y1: at[a][1] + high / 2,
      x2: at[b][0] + wide / 2, y2: at[b][1] + high / 2}));
  const boxes = now.run.stops[now.t].flatMap((held, rank) => {
    const [x, y] = at[rank];
    let below = y + 26;
    const drawn = rows.flatMap(([name, ofQuery, size]) => {
      const top = below;
      below += size + 7;
      const mine = held.find(([thing]) => thing === name);
      return mine ? thingOf(now, mine, ofQuery, x + 9, top, rank) : [];
    });
    const pairs = now.atEnd ? "" : now.run.used[now.t][rank] ? `${now.run.pairs[now.t][rank]} pairs` : "";
    return [
      svg("rect", {class: `box own w${colour(rank)}`, x, y, width: wide, height: high, rx: 8}),
      svg("text", {class: "name", x: x + 9, y: y + 18}, `rank ${rank}${coordinates(now, rank)}`),
      svg("text", {class: "pairs", x: x + wide - 9, y: y + high - 8}, pairs), ...drawn,
    ];
  });
  const [right, bottom] = [0, 1].map((axis) => Math.max(...at.map((place) => place[axis])));
  const picture = svg("svg", {role: "img", viewBox: `0 0 ${right + wide + 4} ${bottom + high + 4}`},
    ...lines, ...boxes);
  picture.setAttribute("aria-label", now.run.stops[now.t].map((held, rank) =>
    `Rank ${rank} holds ${held.map(([name, tokens, heads]) =>
      `${name} of tokens ${runs(tokens.filter((token) => token >= 0))}, heads ${runs(heads)}`).join("; ")}.`).join(" "));
  byId("ring").replaceChildren(picture);
  byId("travel").textContent = movesInWords(now);
}

function coordinates(now, rank) {
  let rest = rank;
  const parts = [];
  for (const [name, size] of [...now.home.mesh].reverse()) {
    parts.unshift(`${name} ${rest % size}`);
    rest = Math.floor(rest / size);
  }
  return parts.length > 1 ? `: ${parts.join(", ")}` : "";
}

// The cells of a thing, in the colour of the rank where their token begins; pale if the rank does not compute with them.
function thingOf(now, [name, tokens, heads], ofQuery, x, y, rank) {
  const used = now.atEnd ? null : now.run.used[now.t][rank];
  const side = used?.[ofQuery ? 0 : 1];
  const owner = ofQuery ? now.home.queries : now.home.keys;
  const offset = ofQuery ? now.home.offset : 0;
  const label = state.pass === "backward" && name === "q" ? "q dy" : name;
  const cells = heads.flatMap((head) => tokens.filter((token) => token >= 0).map((token) => {
    const from = owner.findIndex(([own, theirs]) => own.includes(token) && theirs.includes(head));
    const pale = side && !sums(name) && !(side[0].includes(token) && side[1].includes(head));
    return svg("rect", {class: `own w${colour(from)}${pale ? " past" : ""} ${sums(name) ? "made" : ""}`,
      "data-held": `${rank},${name},${token},${head}`,
      x: x + NAME_WIDE - 8 + (token + offset) * PIXEL, y: y + head * PIXEL,
      width: PIXEL - 0.8, height: PIXEL - 0.8});
  }));
  return [svg("text", {class: "small", x, y: y + (D.problem[ofQuery ? "heads" : "kv_heads"] * PIXEL) / 2 + 4}, label), ...cells];
}

function movesInWords(now) {
  if (now.atEnd) return "The last transfer has arrived.";
  const moves = now.run.moves[now.t];
  if (!moves.length) return "After this step nothing is sent.";
  const words = moves.map((one) => {
    const pairs = [...new Set(one.messages.map(([a, b]) => `${a} \u2192 ${b}`))];
    const routes = pairs.length > now.workers ? "" : ` (${pairs.join(", ")})`;
    return `${one.carries[0]}: ${one.kind} along ${one.axis}${routes}`;
  });
  const sent = now.run.sent[now.t];
  return `After this step: ${words.join("; ")}. A rank sends ${Math.max(...sent)} bytes, all together ${sum(sent)}.`;
}

function schemeSentence(now) {
  if (now.atEnd) {
    return state.pass === "forward" ? "The end. Every copy of every query is at home and has met each of its visible keys once."
      : "The end. All gradients are complete and at home.";
  }
  const busy = now.run.used[now.t].some(Boolean);
  return busy ? `Step ${now.t}. Each rank computes with its ${now.t ? "" : "own "}queries and the keys that it holds now.`
    : `Step ${now.t}. No rank computes: tokens and heads are exchanged first.`;
}

const schemeNote = (now) => (now ? "" : `${state.scheme} has no backward pass: it serves, and does not train.`);

// The numbers of the chosen token and head on every rank that holds them, stop by stop.
function copiesAt(now, stop, name, token, head) {
  return now.run.stops[stop].flatMap((held, rank) => held.flatMap(([thing, tokens, heads, numbers]) => {
    const [t, h] = [tokens.indexOf(token), heads.indexOf(head)];
    return thing === name && t >= 0 && h >= 0 ? [[rank, numbers[h][t].map(decimal)]] : [];
  }));
}

function copiesTable(now, names, caption, token, head, columns, id) {
  const lines = range(now.t + 1).flatMap((stop) => {
    const copies = names.flatMap((name) => copiesAt(now, stop, name, token, head));
    if (!copies.length) return [line(timeOf(now, stop), stopName(now, stop), "none", ...columns.map(() => ""))];
    return copies.map(([rank, values]) => {
      const ended = names.length > 1 && stop === now.steps;
      const numbers = ended ? ["", "", number(values[0]), vector(values.slice(1))]
        : names.length > 1 ? [number(values[0]), number(values[1]), "", vector(values.slice(2))] : [vector(values)];
      return line(timeOf(now, stop), stopName(now, stop), `rank ${rank}`, ...numbers);
    });
  });
  return table(caption, ["after", "is on", ...columns], lines, id);
}

function showCopies(now) {
  const query = state.row - now.home.offset;
  const tables = [];
  if (query < 0) tables.push(html("p", {}, `Token ${state.row} is cached: it is a key, and no query.`));
  else if (state.pass === "forward") {
    tables.push(copiesTable(now, ["m l o", "o lse"], `Query ${state.row}, head ${now.head}`, query, now.head,
      ["m", "l", "lse", "o (divided by l at the end)"], "row-state"));
  } else {
    tables.push(copiesTable(now, ["dq"], `dq of token ${state.row}, head ${now.head}`, query, now.head,
      ["dq, summed so far on this rank"], "row-dq"));
    tables.push(copiesTable(now, ["dk dv"], `dk of token ${state.row}, key head ${now.ofKey}`, state.row, now.ofKey,
      ["dk, summed so far on this rank"], "row-dk"));
  }
  byId("state").replaceChildren(html("div", {class: "states"}, ...tables));
}

start();
