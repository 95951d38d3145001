// The pattern: queries down, keys across; a cell for each visible pair.
const CELL = TOKENS > 32 ? 10 : 16;
const EDGE = 38;
const STRIP = 17; // where the owners' strip begins
const MARGIN = D.bug ? 14 : 3;

// [query, key] of every pair that a worker computes in a step.
function pairsOf(now, t, worker) {
  if (now.pairs) return now.pairs(t, worker);
  const [a, b] = now.travel.meets[t][worker];
  if (a === undefined) return [];
  const visible = (i, j, m, n) => (now.seen ? now.seen[t][worker][m][n] : now.visible[i][j]) === "1";
  return now.table[a].flatMap((i, m) =>
    now.table[b].filter((j, n) => visible(i, j, m, n)).map((j) => [i, j]));
}

// [step, worker] of every computation of a pair, by row and column: one at most, but in a wrong ring.
function computed(now) {
  const cells = range(TOKENS).map(() => range(TOKENS).map(() => []));
  for (let t = 0; t < now.steps; t++) {
    for (let worker = 0; worker < now.workers; worker++) {
      for (const [i, j] of pairsOf(now, t, worker)) cells[i][j].push([t, worker]);
    }
  }
  return cells;
}

// What the picture shows of a pair: its computation in this step, else an earlier one, else a later one.
function cellAt(now, times) {
  const ofStep = times.find(([t]) => t === now.t) ?? times.find(([t]) => t < now.t) ?? times[0];
  if (!ofStep) return ["never", null];
  return [ofStep[0] === now.t ? "now" : ofStep[0] < now.t ? "past" : "later", ofStep];
}

function showPattern(now) {
  const size = EDGE + TOKENS * CELL + MARGIN;
  const drawn = [];
  const count = {now: 0, past: 0, later: 0, never: 0};
  computed(now).forEach((row, i) => row.forEach((times, j) => {
    const [kind, cell] = cellAt(now, times);
    count[kind] += 1;
    drawn.push(...cellOf(kind, i, j, cell));
  }));
  const most = TOKENS * CELL;
  const picture = svg("svg", {viewBox: `0 0 ${size} ${size}`, role: "img"},
    svg("rect", {class: "grid", x: EDGE, y: EDGE, width: most, height: most}),
    ...drawn, ...strips(now),
    svg("text", {class: "small", x: EDGE + most / 2, y: 10, "text-anchor": "middle"}, "keys, by owner"),
    svg("text", {class: "small", transform: `translate(10 ${EDGE + most / 2}) rotate(-90)`,
      "text-anchor": "middle"}, "queries, by owner"),
    svg("rect", {class: "chosen", x: STRIP, y: EDGE + state.row * CELL, width: size - STRIP - 2, height: CELL}));
  if (D.bug) picture.insertBefore(svg("g", {id: "differing"}), picture.lastElementChild);
  picture.setAttribute("aria-label",
    `${TOKENS} queries by ${TOKENS} keys: ${count.now} pairs in this step, ${count.past} in earlier ` +
    `ones, ${count.later} still to come, ${count.never} masked. Row ${state.row} is chosen.`);
  picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect();
    choose(Math.floor((((event.clientY - box.top) / box.height) * size - EDGE) / CELL));
  });
  byId("pattern").replaceChildren(picture);
  const words = {
    now: `this step, with the number of the ${WHO}`, past: "earlier", later: "still to come",
    never: "masked",
  };
  byId("pattern-key").replaceChildren(...Object.entries(words).map(([kind, meaning]) =>
    html("li", {}, html("span", {class: `sample ${kind}`, "aria-hidden": "true"}),
      html("b", {id: `pairs-${kind}`}, count[kind]), ` ${meaning}`)));
}

function cellOf(kind, i, j, cell) {
  const [x, y] = [EDGE + j * CELL, EDGE + i * CELL];
  if (kind === "never") return [];
  if (kind === "later") {
    return [svg("circle", {class: "cell-later", cx: x + CELL / 2, cy: y + CELL / 2, r: CELL / 8})];
  }
  const own = colour(cell[1]);
  const look = {x: x + 0.5, y: y + 0.5, width: CELL - 1, height: CELL - 1};
  if (kind === "past") return [svg("rect", {class: `cell past own w${own}`, ...look})];
  return [
    svg("rect", {class: `cell now own w${own}`, "data-pair": `${i},${j},${cell[1]}`, ...look}),
    digit(cell[1], x + CELL / 2, y + CELL / 2, CELL),
  ];
}

// A worker's number in the middle of a square or bar, as large as `room` allows.
const digit = (worker, x, y, room) =>
  svg("text", {class: `digit on w${colour(worker)}${room < 12 ? " tight" : ""}`, x, y: y + 0.36 * Math.min(room - 1, 12)},
    worker);

// Who owns the queries and the keys, along the edges: a bar for tokens in a row on one worker.
function barsOf(owners) {
  const bars = [];
  owners.forEach((owner, token) => {
    const last = bars[bars.length - 1];
    if (last && last.owner === owner) last.count += 1;
    else bars.push({owner, token, count: 1});
  });
  return bars.filter(({owner}) => owner >= 0).map(({owner, token, count}) => {
    const [place, length, wide] = [EDGE + token * CELL, count * CELL, EDGE - STRIP - 2];
    return [owner, place, length, wide, place + length / 2, STRIP + wide / 2, {class: `bar own w${colour(owner)}`}];
  });
}

function strips(now) {
  return [
    ...barsOf(now.owner).flatMap(([owner, place, length, wide, middle, across, look]) => [
      svg("rect", {...look, x: place, y: STRIP, width: length, height: wide}),
      digit(owner, middle, across, length),
    ]),
    ...barsOf(now.queryOwner ?? now.owner).flatMap(([owner, place, length, wide, middle, across, look]) => [
      svg("rect", {...look, x: STRIP, y: place, width: wide, height: length}),
      digit(owner, across, middle, length),
    ]),
  ];
}
