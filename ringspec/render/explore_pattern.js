// The pattern: queries down, keys across; a cell for each pair that the mask lets through.
const CELL = TOKENS > 32 ? 10 : 16;
const EDGE = 38;
const STRIP = 17; // where the owners' strip begins

// [step, worker] for every visible pair, by row and column.
function computed(now) {
  const cells = range(TOKENS).map(() => Array(TOKENS).fill(null));
  now.travel.meets.forEach((met, t) => met.forEach((pair, worker) => {
    if (!pair.length) return;
    for (const i of now.table[pair[0]]) {
      for (const j of now.table[pair[1]]) {
        if (now.visible[i][j] === "1") cells[i][j] = [t, worker];
      }
    }
  }));
  return cells;
}

function showPattern(now) {
  const size = EDGE + TOKENS * CELL + 3;
  const drawn = [];
  const count = {now: 0, past: 0, later: 0, never: 0};
  computed(now).forEach((row, i) => row.forEach((cell, j) => {
    const kind = !cell ? "never" : cell[0] === now.t ? "now" : cell[0] < now.t ? "past" : "later";
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
  picture.setAttribute("aria-label",
    `${TOKENS} queries by ${TOKENS} keys: ${count.now} pairs in this step, ${count.past} in earlier ` +
    `ones, ${count.later} still to come, ${count.never} masked. Row ${state.row} is chosen.`);
  picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect();
    choose(Math.floor((((event.clientY - box.top) / box.height) * size - EDGE) / CELL));
  });
  byId("pattern").replaceChildren(picture);
  const words = {
    now: "this step, with the number of the worker", past: "earlier", later: "still to come",
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
function strips(now) {
  const bars = [];
  now.owner.forEach((owner, token) => {
    const last = bars[bars.length - 1];
    if (last && last.owner === owner) last.count += 1;
    else bars.push({owner, token, count: 1});
  });
  return bars.flatMap(({owner, token, count}) => {
    const [place, length, wide] = [EDGE + token * CELL, count * CELL, EDGE - STRIP - 2];
    const [middle, across] = [place + length / 2, STRIP + wide / 2];
    const look = {class: `bar own w${colour(owner)}`};
    return [
      svg("rect", {...look, x: place, y: STRIP, width: length, height: wide}),
      digit(owner, middle, across, length),
      svg("rect", {...look, x: STRIP, y: place, width: wide, height: length}),
      digit(owner, across, middle, length),
    ];
  });
}
