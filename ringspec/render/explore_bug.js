// The page of a known bug: what differs between the wrong ring and the right one at the same stop is marked.
const opposite = () => scene(state.ring === "wrong" ? "right" : "wrong");

function exchange() {
  state.ring = state.ring === "wrong" ? "right" : "wrong";
  show();
}

function compare(now) {
  const other = Object.assign(opposite(), {t: now.t, atEnd: now.atEnd});
  const pairs = differingPairs(now, other);
  const names = Object.keys(now.run.traces);
  const rows = names.map((name) => differingRows(now, other, name));
  byId("differing").replaceChildren(...pairMarks(pairs), ...rowMarks(rows));
  byId("pattern-key").append(html("li", {}, html("span", {class: "sample differs", "aria-hidden": "true"}),
    html("b", {id: "pairs-differ"}, pairs.length), " differ from the other ring so far"),
  html("li", {}, html("span", {class: "sample mark", "aria-hidden": "true"}),
    "at the edge: tokens whose numbers differ now"));
  markChips(now, other);
  markCells("#row-state, #row-dq, #row-dk", rowTables(other), other.ring);
  const of = {softmax: "queries have other numbers", dq: "queries have another dq", dk: "keys have another dk"};
  const counts = names.map((name, n) => `${rows[n].length} of ${TOKENS} ${of[name]}`);
  byId("note").textContent = `Compared with the ${other.ring} ring (press r to see it at this step): ` +
    `${pairs.length} pairs differ so far; ${counts.join("; ")}.`;
  byId("note").hidden = false;
}

// [query, key] of pairs that one ring has computed more often than the other up to this stop.
function differingPairs(now, other) {
  const [mine, theirs] = [computed(now), computed(other)];
  const done = (times) => times.filter(([t]) => t <= now.t).length;
  return range(TOKENS).flatMap((i) =>
    range(TOKENS).filter((j) => done(mine[i][j]) !== done(theirs[i][j])).map((j) => [i, j]));
}

// The tokens whose numbers differ at this stop.
function differingRows(now, other, name) {
  const at = ({run}, token) => summed(D.traces[summed(run.traces[name])[token]])[now.t];
  return range(TOKENS).filter((token) => at(now, token) !== at(other, token));
}

const pairMarks = (pairs) => pairs.map(([i, j]) => svg("rect", {
  class: "differs", "data-differs": `${i},${j}`, x: EDGE + j * CELL + 1, y: EDGE + i * CELL + 1,
  width: CELL - 2, height: CELL - 2}));

// Beside the pattern for queries, below it for keys.
function rowMarks([ofQueries, ofKeys = []]) {
  const [end, wide] = [EDGE + TOKENS * CELL + 4, 8];
  return [
    ...ofQueries.map((token) =>
      svg("rect", {class: "mark", x: end, y: EDGE + token * CELL + 1, width: wide, height: CELL - 2})),
    ...ofKeys.map((token) =>
      svg("rect", {class: "mark", x: EDGE + token * CELL + 1, y: end, width: CELL - 2, height: wide})),
  ];
}

// A block that the other ring does not have on the same worker.
function markChips(now, other) {
  for (const chip of chips.made.values()) {
    const {worker, owner, names} = chip.dataset;
    const there = other.travel.stops[now.t][worker].filter(([of]) => of === Number(owner)).flat();
    chip.classList.toggle("differs", names.split(" ").some((name) => !there.includes(name)));
  }
}

// Cells of tables with other words than in the tables of the other ring, whose row of this stop is added.
function markCells(selector, twins, name) {
  const shown = document.querySelectorAll(selector);
  twins.forEach((twin, n) => {
    const theirs = twin.querySelectorAll("td");
    shown[n].querySelectorAll("td").forEach((cell, m) => {
      cell.classList.toggle("differs", cell.textContent !== theirs[m].textContent);
    });
    const row = twin.querySelector("tr.now");
    row.className = "other";
    row.firstElementChild.textContent = `${name} ring`;
    shown[n].querySelector("tr.now").after(row);
  });
}

start();
