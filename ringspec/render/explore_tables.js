// Numbers: the state of one row after each step, work and waiting, bytes.
const NOT_FINITE = {nan: "NaN", inf: "\u221e"};
function number(value) {
  if (value === null) return "\u2212\u221e";
  return NOT_FINITE[value] ?? value.toFixed(D.problem.decimals).replace("-", "\u2212");
}
const vector = (values) => values.map((value) => html("span", {class: "vector"}, number(value)));
const timeOf = (now, stop) => (stop === now.t ? "now" : stop < now.t ? "past" : "ahead");

function table(caption, heads, rows, id) {
  return html("div", {class: "wide"}, html("table", {id},
    html("caption", {}, caption),
    html("thead", {}, html("tr", {}, ...heads.map((head) => html("th", {scope: "col"}, head)))),
    html("tbody", {}, ...rows)));
}

function line(look, first, ...entries) {
  return html("tr", {class: look}, html("th", {scope: "row"}, first),
    ...entries.map((entry) => (Array.isArray(entry)
      ? html("td", {class: "vectors"}, ...entry) : html("td", {}, entry))));
}

const stopName = (now, stop) => (stop === now.steps ? "the end" : `step ${stop}`);

// Places are written as differences from the previous place, numbers as integers.
const summed = (differences) => {
  let place = 0;
  return differences.map((difference) => (place += difference));
};
const UNIT = 10 ** D.problem.decimals;
const decimal = (value) => (typeof value === "number" ? value / UNIT : value);

// The numbers of the chosen token at each stop.
const trace = (now, name) => {
  const of = summed(now.run.traces[name])[state.row];
  return summed(D.traces[of]).map((place) => D.numbers[place]?.map(decimal) ?? null);
};

// The visible keys of the chosen row in a step, or the queries to which the chosen key is visible.
function partners(now, t, ofKey) {
  const [mine, theirs] = ofKey ? [1, 0] : [0, 1];
  const pairs = range(now.workers).flatMap((worker) => pairsOf(now, t, worker));
  const found = pairs.filter((pair) => pair[mine] === state.row).map((pair) => pair[theirs]);
  return runs(found.sort((a, b) => a - b)) || "none";
}

// Which workers hold a name of the chosen row's block at a stop.
function holders(now, stop, name) {
  const owner = now.owner[state.row];
  return now.travel.stops[stop].flatMap((blocks, worker) =>
    blocks.some(([of, ...names]) => of === owner && names.includes(name)) ? [worker] : []);
}

const rowTables = (now) => (state.pass === "forward" ? [forwardTable(now)]
  : [gradientTable(now, "dq", "query", false), gradientTable(now, "dk", "key", true)]);

const showRow = (now) =>
  byId("state").replaceChildren(html("div", {class: "states"}, ...rowTables(now)));

function forwardTable(now) {
  const values = trace(now, "softmax");
  const worker = now.owner[state.row];
  const zeros = vector(Array(D.problem.head_dim).fill(0));
  const lines = [line("past", "before", "", number(null), number(0), number(null), zeros)];
  for (let t = 0; t < now.steps; t++) {
    if (t > now.t) {
      lines.push(line("ahead", stopName(now, t), "", "", "", "", ""));
      continue;
    }
    const [m, l, lse, ...o] = values[t];
    lines.push(line(timeOf(now, t), stopName(now, t), partners(now, t, false),
      number(m), number(l), number(lse), vector(o)));
  }
  const [lse, ...o] = now.atEnd ? values[now.steps] : [];
  lines.push(now.atEnd
    ? line("now", "o / l", "", "", "", number(lse), vector(o))
    : line("ahead", "o / l", "", "", "", "", ""));
  const heads = ["after", "visible keys", "m", "l", "lse", "o, not yet divided by l"];
  const made = table(`Query ${state.row}, which stays with worker ${worker}`, heads, lines, "row-state");
  made.append(html("p", {id: "merge"}, mergeWords(now, values)));
  return made;
}

// By how much a step shrinks what was there before it.
function mergeWords(now, values) {
  if (now.seen) return "";
  if (now.atEnd) return "o is divided by l once, at the end.";
  const [m, l] = values[now.t];
  const [before, sumBefore] = now.t ? values[now.t - 1] : [null, 0];
  if (m === null) return "The row has seen no key yet: m = \u2212\u221e, l = 0.";
  if (m === before && l === sumBefore) return "No key of this step is visible to the row: nothing changes.";
  if (before === null) return `The first keys: m is their largest score, ${number(m)}.`;
  if (m === before) return "m did not rise: the new keys' terms are added to l and o as they are.";
  return `m rose from ${number(before)} to ${number(m)}. So l and o were first multiplied by ` +
    `exp(${number(before)} \u2212 ${number(m)}) = ${Math.exp(before - m).toFixed(3)}; then the new keys' ` +
    "terms were added.";
}

function gradientTable(now, name, of, ofKey) {
  const values = trace(now, name);
  const lines = range(now.steps + 1).map((stop) => {
    if (stop > now.t) return line("ahead", stopName(now, stop), "", "", "");
    const met = stop < now.steps ? partners(now, stop, ofKey) : "";
    const at = holders(now, stop, name);
    const partial = values[stop] !== null ? vector(values[stop])
      : at.length ? `${at.length} partial sums, not yet added` : "lost";
    const where = at.length ? `worker ${runs(at)}` : "no worker";
    return line(timeOf(now, stop), stopName(now, stop), met, where, partial);
  });
  const heads = ["after", ofKey ? "visible to queries" : "visible keys", `${name} is at`, `${name}, summed so far`];
  const owner = `owner: worker ${now.owner[state.row]}`;
  return table(`${name} of ${of} ${state.row} (${owner})`, heads, lines, `row-${name}`);
}

// A lane for each worker: time runs to the right, all begin a step together, stripes are waiting.
function showLoad(now) {
  const done = Math.min(now.t, now.steps - 1);
  const longest = now.run.pairs.map((pairs) => Math.max(...pairs));
  const whole = Math.max(1, sum(longest));
  const lanes = range(now.workers).map((worker) => {
    const track = html("div", {class: "track"});
    for (let t = 0; t <= done; t++) {
      const pairs = now.run.pairs[t][worker];
      track.append(piece(`work w${colour(worker)} ${timeOf(now, t)}`, pairs / whole),
        piece("waits", (longest[t] - pairs) / whole));
    }
    return html("div", {class: "lane"}, html("span", {}, `${WHO} ${worker}`), track);
  });
  const rows = range(now.workers).map((worker) => {
    const pairs = now.run.pairs.slice(0, done + 1).map((all) => all[worker]);
    const waits = pairs.map((one, t) => longest[t] - one);
    const pair = now.atEnd || now.computes ? [] : now.travel.meets[now.t][worker];
    return line("", `${worker}: ${runs(now.table[worker])}`,
      now.computes ? now.computes(worker) : pair.length ? `q${subscript(pair[0])} \u00d7 k${subscript(pair[1])}` : "\u2013",
      now.atEnd ? "\u2013" : pairs[done], now.atEnd ? "\u2013" : waits[done], sum(pairs), sum(waits));
  });
  const heads = [`${WHO}: its ${D.schemes ? "queries" : "tokens"}`, "computes", "pairs now", "waits now", "pairs so far", "waited so far"];
  byId("load").replaceChildren(html("div", {class: "lanes", "aria-hidden": "true"}, ...lanes),
    table("In pairs of a query and a key", heads, rows, "load-table"));
  byId("load-words").textContent =
    `Whole pass: ${sum(now.run.pairs.flat())} pairs. The busiest ${WHO} does ` +
    `${now.run.imbalance.toFixed(2)} times the mean; with the waiting at every step the pass takes ` +
    `${now.run.lockstep_imbalance.toFixed(2)} times as long as with perfect balance.`;
}

function piece(look, share) {
  const made = html("div", {class: look});
  made.style.width = `${100 * share}%`;
  return made;
}

function showBytes(now) {
  let total = 0;
  document.querySelector(".bytes").hidden = Boolean(now.seen);
  if (now.seen) return;
  const rows = now.run.sent.map((sent, t) => {
    total += sum(sent);
    const names = now.travel.sends[t].length ? carried(now.travel.sends[t]) : "nothing";
    return line(t === now.t ? "now" : t < now.t ? "past" : "ahead", `step ${t}`, names,
      Math.max(...sent), sum(sent), t <= now.t ? total : "");
  });
  const heads = ["after", "what travels", D.schemes ? "bytes, most" : "bytes, each", "bytes, all", "so far"];
  byId("bytes").replaceChildren(table(now.travel.name, heads, rows, "bytes-table"),
    html("p", {id: "bytes-total"}, `Whole pass: ${total} bytes.`));
}
